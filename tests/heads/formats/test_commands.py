"""The verbs ``export`` and ``import``, from files to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import DraftHeads
from heads.target import Target
from headstart import main
from tests.heads.formats.engine import stored
from tests.heads.small import logits_of, small_heads
from tests.tiny import tiny_model


@pytest.fixture
def world(tmp_path: Path) -> tuple[DraftHeads, Path]:
    """EAGLE-3 heads in float32 on a stored bfloat16 target, in ``heads`` and ``target``."""
    tiny_model("llama", layers=8, dtype=torch.bfloat16).save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), dtype="auto")
    assert target.dtype == torch.bfloat16
    made = small_heads("eagle", target, taps=(2, 4, 5), draft_vocab=20).float()
    made.save_pretrained(tmp_path / "heads")
    return made, tmp_path


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    status = main([str(arg) for arg in args])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_export_and_import(world: tuple[DraftHeads, Path], capsys: pytest.CaptureFixture[str]) -> None:
    made, folder = world
    args = ["export", folder / "heads", "--to", "eagle3", "--out", folder / "out", "--json", folder / "out.json"]
    status, text, _ = run(capsys, *args)
    assert status == 0 and "eagle3: 15 tensors in float32 written" in text and "right in vllm and sglang" in text
    assert f"target recorded as {folder / 'target'} (another name: --target-name)" in text
    report = json.loads((folder / "out.json").read_text())
    assert report["files"] == ["config.json", "model.safetensors"] and report["engines"] == ["vllm", "sglang"]

    args = ["import", folder / "out", "--target", folder / "target", "--out", folder / "back", "--lookahead", 3]
    status, text, _ = run(capsys, *args, "--json", folder / "back.json")
    assert status == 0 and "eagle3: eagle heads, look-ahead 3, taps [2, 4, 5]" in text
    report = json.loads((folder / "back.json").read_text())
    assert (report["kind"], report["dtype"], report["draft_vocab_size"]) == ("eagle", "float32", 20)
    assert report["parameters"] == sum(parameter.numel() for parameter in made.parameters())
    back = DraftHeads.from_pretrained(folder / "back", made.target, dtype=torch.float32)
    assert back.config == made.config and torch.equal(logits_of(back), logits_of(made))
    assert (folder / "back" / "heads.safetensors").read_bytes() == (folder / "heads" / "heads.safetensors").read_bytes()


def test_dtype_names_and_a_moved_target(world: tuple[DraftHeads, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = world
    (folder / "target").rename(folder / "moved")
    args = ["export", folder / "heads", "--to", "speculators", "--out", folder / "out"]
    status, _, error = run(capsys, *args)
    assert status == 2 and "error: " in error and not (folder / "out").exists()
    args += ["--target", folder / "moved", "--dtype", "bfloat16", "--target-name", "org/target"]
    status, text, _ = run(capsys, *args)
    assert status == 0 and "target recorded as org/target" in text and text.count("right in vllm\n") == 1
    config, tensors = stored(folder / "out")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert tensors["fc.weight"].dtype == torch.bfloat16
    status, text, _ = run(capsys, "import", folder / "out", "--target", folder / "moved", "--out", folder / "back")
    assert status == 0 and "the checkpoint names its target org/target" in text


def test_refusals_are_one_line_and_leave_nothing(
    world: tuple[DraftHeads, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = world
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    heads, target = folder / "heads", folder / "target"
    wrong: list[tuple[list[Any], str]] = [
        (["export", heads, "--to", "medusa", "--out", folder / "out"], "heads of kind eagle have no medusa form"),
        (["export", heads, "--to", "eagle1", "--out", folder / "out"], "heads of kind eagle have no eagle1 form"),
        (["export", heads, "--to", "eagle3", "--out", folder / "full"], "is there already and not empty"),
        (["export", target, "--to", "eagle3", "--out", folder / "out"], "config.json"),
        (["import", heads, "--target", target, "--out", folder / "out"], "there is nothing to import"),
        (["import", target, "--target", target, "--out", folder / "out"], "is of none of the formats"),
        (["import", folder / "no", "--target", target, "--out", folder / "out"], "there is no"),
        (["import", heads, "--target", target, "--out", folder / "full"], "is there already and not empty"),
    ]
    for args, message in wrong:
        status, _, error = run(capsys, *args)
        assert status == 2, args
        last = error.splitlines()[-1]  # behind transformers' bars
        assert last.startswith("error: ") and message in last, args
    assert sorted(path.name for path in folder.iterdir()) == ["full", "heads", "target"]
    assert [path.name for path in (folder / "full").iterdir()] == ["mine.txt"]


def test_help_shows_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "--to {speculators,economize,medusa,dspark,dflash,eagle3,eagle1}" in shown
        and "EAGLE-3 for vLLM and SGLang" in shown
    )
