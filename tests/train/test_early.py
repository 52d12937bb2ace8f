"""What is wrong with an evaluation is told before hours of work; what it cannot do costs nothing that was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.kinds import build, make_config
from heads.target import Target
from tests.tiny import tiny_model
from tests.train.conftest import Launch
from tests.train.world import losses
from train import decode_eval, evaluation
from train.decode_eval import decode_prompts
from train.ranks import Ranks
from train.train_heads import main


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, r"data\.heldout is .*none\.jsonl, and .* does not exist"),
        ("", r"no usable row in none\.jsonl .*is empty: it has no row"),
        ('{"text": "abc"}', r"no conversation has a prompt to decode; set eval\.prompts to 0"),
    ],
)
def test_held_out_conversations_are_looked_at_first(
    rows: str | None, message: str, world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows is not None:
        (world / "none.jsonl").write_text(rows)
    monkeypatch.setattr("train.train_heads.make_features", lambda *_: pytest.fail("states were computed"))
    with pytest.raises((ValueError, OSError), match=message):
        launch("--data.heldout", world / "none.jsonl")


def test_an_evaluation_that_fails_leaves_a_checkpoint(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "decode_prompts", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(ValueError, match="out of memory in the evaluation at step 6: lower"):
            launch()
    assert [path.name for path in (world / "run" / "checkpoints").iterdir()] == ["step-00000006"]
    assert launch()["decoded"]["prompts"] == 3
    assert "resumed: step 6 of 6" in capsys.readouterr().err
    assert list(losses(world / "run")) == [1, 2, 3, 4, 5, 6]


def test_prompts_are_decoded_to_the_targets_last_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve positions: seven new tokens behind a prompt of six, the last of which needs none; four behind one of
    nine; and an error where more were asked."""
    target = Target(tiny_model("llama", max_position_embeddings=12))
    heads = build(make_config("medusa", target, lookahead=2), target)
    heads.initialize()
    found = decode_prompts(heads, [torch.arange(1, 7), torch.arange(1, 10)], Ranks(), tokens=50)
    assert found.rounds * found.tokens_per_round == pytest.approx(6 + 3)  # the prefill's token of each is no round's
    monkeypatch.setattr(decode_eval, "_room", lambda *_: 50)
    with pytest.raises(ValueError, match="has 12 positions"):
        decode_prompts(heads, [torch.arange(1, 7)], Ranks(), tokens=50)


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("train:\n\tlr: 1\n")
    assert main(["--config", str(tmp_path / "recipe.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "recipe.yaml is not valid YAML" in said and said.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_report_is_written_again(content: str, world: Path, launch: Launch) -> None:
    quick = ("--train.max_steps", 1, "--eval.prompts", 0, "--eval.conversations", 0)
    launch(*quick)
    (world / "run" / "report.json").write_text(content)
    assert launch(*quick)["steps"] == 1
    assert '"steps": 1' in (world / "run" / "report.json").read_text()
