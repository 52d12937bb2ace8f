"""A target that is a configuration alone: what it is said to need is what the target of that shape needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import train.dry_run as dry
from headstart import main
from tests.train.conftest import _reset
from tests.train.world import ROOT
from train.assemble import load_conversations
from train.config import TargetConfig
from train.launch import start
from train.outline import META, SizesOnly, is_outline, outline
from train.progress import Reporter
from train.ranks import Ranks
from train.settings import load
from train.targets import load_target
from train.work import counted

EXACT = ("--train.precision", "no", "--train.micro_tokens", "80")


def told(world: Path, *arguments: Any) -> dict[str, Any]:
    _reset()
    return dry.dry_run(["--config", str(world / "recipe.yaml"), *EXACT, *map(str, arguments)])[0]


@pytest.fixture
def prepared(world: Path) -> list[str]:
    """Settings that name the world's conversations as they are prepared, which needs no tokenizer any more."""
    config = load(world / "recipe.yaml", [])
    accelerator = start(config)
    target = load_target(config, accelerator)
    for part in ("train", "heldout"):
        load_conversations(config, part, target, Ranks(accelerator), Reporter(False))
    folder = world / "run" / "prepared"
    return ["--data.train", str(folder / "train"), "--data.heldout", str(folder / "heldout")]


@pytest.fixture
def shape(world: Path) -> Path:
    """The target's configuration without its weights."""
    path = world / "shape.json"
    path.write_text((world / "target" / "config.json").read_text())
    return path


@pytest.mark.parametrize(
    "kind",
    [
        ("--heads.kind", "eagle"),
        ("--heads.kind", "block", "--heads.options.confidence", "true"),
        ("--heads.kind", "medusa", "--heads.taps", "null"),
        ("--heads.kind", "hydra", "--heads.taps", "null"),
    ],
    ids=lambda kind: kind[1],
)
def test_it_is_said_to_need_what_the_target_itself_needs(
    kind: tuple[str, ...], world: Path, prepared: list[str], shape: Path
) -> None:
    real, drawn = (told(world, *kind, *prepared, "--target.name", name) for name in (world / "target", shape))
    for part in ("heads", "data", "steps"):
        assert drawn[part] == real[part], part
    assert drawn["disk"]["states"] == real["disk"]["states"]
    assert abs(drawn["disk"]["heads"] - real["disk"]["heads"]) < 200, "config.json names another target"
    for name in ("heads", "target", "total"):
        assert drawn["work"][name] == pytest.approx(real["work"][name], rel=0.01), name
    assert drawn["target"]["parameters"] == real["target"]["parameters"]
    for name in ("target", "heads", "gradients", "optimizer"):
        assert drawn["memory"]["parts"][name] == real["memory"]["parts"][name], name
    (training, ours), (states, most) = list(drawn["memory"]["moments"].items())[:2]
    assert training.startswith("training") and states.startswith("computing")
    theirs = real["memory"]["moments"]
    assert 0.6 < ours / theirs[training] < 1.7
    assert 0.6 < most / theirs[states] < 4, "an outline's attention is not fused: so much at most"


def test_work_is_counted(world: Path) -> None:
    """Of medusa's two layers of a head, by hand: H × H and H × Vd, three times as much with the way back."""
    found = told(world, "--heads.kind", "medusa", "--heads.taps", "null", "--train.max_steps", "12")
    config = json.loads((world / "target" / "config.json").read_text())
    width, rows = config["hidden_size"], found["data"]["answer_tokens"]
    epochs = found["steps"]["epochs"]
    own = 3 * (2 * width * (width + 100) * 3 * 3)  # a row of three heads, forward, to the input, to the weights
    assert own * rows * epochs * 0.2 < found["work"]["heads"] < own * rows * epochs * 1.5
    assert found["work"]["total"] == found["work"]["heads"] + found["work"]["target"]
    hours = found["work"]["gpu_hours"]
    assert hours["100 TFLOP/s"] == pytest.approx(found["work"]["total"] / 1e14 / 3600)
    assert hours["400 TFLOP/s"] == pytest.approx(hours["100 TFLOP/s"] / 4)
    online = told(world, "--heads.kind", "medusa", "--heads.taps", "null", "--train.max_steps", "12",
                  "--data.features", "online")["work"]  # fmt: skip
    tokens = found["data"]["tokens"]
    assert online["target"] == pytest.approx(epochs * tokens * online["target_per_token"]), "each epoch, not once"
    assert found["work"]["target"] == pytest.approx(tokens * found["work"]["target_per_token"])
    assert 1 < found["work"]["target_per_token"] / online["target_per_token"] < 3, "texts of a pass are padded alike"


def test_what_is_a_configuration_alone(world: Path, tmp_path: Path, shape: Path) -> None:
    assert is_outline(str(shape)) and not is_outline(str(world / "target"))
    assert not is_outline("headstart/smollm2-135m-q4") and not is_outline(str(tmp_path / "nowhere.json"))
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "config.json").write_text(shape.read_text())
    assert is_outline(str(folder))
    for name in ("llama-8b", "llama-70b"):
        assert is_outline(str(ROOT / "configs" / "shapes" / f"{name}.json"))


@pytest.mark.parametrize(("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.55)])
def test_the_shapes_that_come_along(name: str, billions: float) -> None:
    with SizesOnly():
        target = outline(TargetConfig(name=str(ROOT / "configs" / "shapes" / f"{name}.json")))
    assert sum(p.numel() for p in target.model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    assert {p.device for p in target.model.parameters()} == {META}


def test_what_it_lacks_is_said(
    world: Path, shape: Path, prepared: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--dry-run", "--config", str(world / "recipe.yaml"), "--target.name", str(shape)]
    assert main(words) == 2
    assert "is a configuration alone and has no tokenizer: name prepared conversations" in capsys.readouterr().err
    assert main([*words, "--target.quantization", "int8"]) == 2
    assert "cannot be adapted or quantized" in capsys.readouterr().err
    inside = ["--heads.kind", "mtp", "--heads.taps", "null", "--heads.draft_vocab_size", "null"]
    assert main([*words, *prepared, *inside]) == 2
    assert "mtp heads are trained inside the target, which" in capsys.readouterr().err
    shape.write_text('{"model_type": "nowhere"}')
    assert main(words) == 2
    assert "is no configuration of a model that transformers knows" in capsys.readouterr().err


def test_known_and_unknown_numbers_meet() -> None:
    states = torch.empty(2, 5, 3, device=META)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 0]], dtype=torch.bool)
    with SizesOnly():
        assert states[mask].shape == (4, 3) and states[mask].device == META
        assert (states * torch.ones(3)).device == META
        assert torch.arange(4, device=META).tolist() == [0, 1, 2, 3]
        assert torch.rand(4, device=META).argsort().sort().values.tolist() == [0, 1, 2, 3]
        assert float(states.sum()) == 1.0
        known = torch.full((2, 5), 7.0)
        known[mask] = torch.empty(4, device=META)
        assert known.device.type == "cpu" and known[0].tolist() == [0, 7, 0, 0, 7]


def test_fused_attention_is_counted_where_heads_share_keys() -> None:
    query, key = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)
    grouped = counted(lambda: scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True))
    assert grouped == 2 * (2 * 4 * 6 * 6 * 8) * 2  # two products, each a multiplication and an addition
    assert counted(lambda: torch.zeros(3, 5) @ torch.zeros(5, 7)) == 2 * 3 * 5 * 7
    with torch.inference_mode():
        assert counted(lambda: torch.nn.functional.linear(torch.zeros(3, 5), torch.zeros(7, 5))) == 2 * 3 * 5 * 7
