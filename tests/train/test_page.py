"""docs/training.md: every launch on it is one, and every setting that it names exists."""

from __future__ import annotations

import re
import sys

import pytest

from tests.gpu_commands import check_command
from tests.train.world import ROOT
from tests.written import commands
from train.config import RunConfig
from train.settings import SECTIONS, SettingsError, fields_of, to_dict

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
LAUNCHES = [words[2:] for words in commands(PAGE) if words[:2] == ["accelerate", "launch"]]


@pytest.mark.parametrize("words", LAUNCHES, ids=lambda words: words[-1])
def test_a_launch_is_one(words: list[str]) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu1.yaml"]
    check_command([*launcher, *words], ROOT)
    with pytest.raises(SettingsError, match="did you mean"):
        check_command([*launcher, *words, "--target.adaptor", "x"], ROOT)


def test_settings_and_files_that_it_names_exist() -> None:
    assert len(LAUNCHES) == 4
    settings = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in fields_of(kind)}
    named = {name for name in re.findall(r"`(?:--)?((?:data|heads|target|train)\.[a-z_]+)", PAGE)}
    assert {"heads.init", "heads.lora", "data.features", "data.feature_dtype"} <= named <= settings
    modes = next(item for name, (_, item) in fields_of(SECTIONS["data"]).items() if name == "features")
    table = PAGE.partition("| `data.features` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(modes.metadata["choices"])
    assert to_dict(RunConfig())["data"]["feature_dtype"] == "bfloat16"
    for name in re.findall(r"(?:tests|configs)/[\w/]+\.(?:py|sh|yaml)", PAGE):
        assert (ROOT / name).is_file(), name
