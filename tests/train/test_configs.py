"""Launch configurations that ship are ones that accelerate and DeepSpeed take, and say how they are used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.train.world import ROOT

CONFIGS = ROOT / "configs"
LAUNCHES = sorted((CONFIGS / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_accelerate_takes_it(path: Path) -> None:
    found = load_config_from_file(str(path))
    content = yaml.safe_load(path.read_text())
    assert found.num_processes == content["num_processes"]
    assert found.num_machines == (2 if "nodes" in path.stem else 1)
    assert f"configs/accelerate/{path.name}" in path.read_text()  # its header says how it is launched
    if found.distributed_type == "DEEPSPEED":
        named = ROOT / content["deepspeed_config"]["deepspeed_config_file"]
        stage = json.loads(named.read_text())["zero_optimization"]["stage"]
        assert path.stem.startswith(f"zero{stage}")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_leave_to_the_recipe_what_is_the_recipes(stage: int) -> None:
    content = json.loads((CONFIGS / "deepspeed" / f"zero{stage}.json").read_text())
    assert content["zero_optimization"]["stage"] == stage
    assert not {"optimizer", "scheduler", "bf16", "fp16"} & content.keys()


def test_every_file_that_is_named_exists() -> None:
    texts = [
        path.read_text() for path in (*LAUNCHES, CONFIGS / "accelerate" / "slurm.sh", ROOT / "train" / "launch.py")
    ]
    named = {name for text in texts for name in re.findall(r"configs/[\w/]+\.(?:yaml|json|sh)", text)}
    assert named and [name for name in sorted(named) if not (ROOT / name).is_file()] == []
