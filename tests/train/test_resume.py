"""A run that was killed anywhere goes on as if it had not been: weights, optimizer, log and report, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train.evaluation as evaluation
from tests.train.compare import killed_at, same
from tests.train.conftest import Launch
from tests.train.world import log_of
from train.checkpoint import Checkpoints
from train.interrupt import Interrupted
from train.step import Stepper

# three or more micro-batches a step, and checkpoints that fall between two lines of the log
RECIPE = ("--train.micro_tokens", 60, "--train.max_steps", 8, "--train.log_every", 4, "--train.save_every", 3)


@pytest.fixture
def whole(world: Path, launch: Launch) -> Path:
    """The run that nothing happened to."""
    launch(*RECIPE, "--output.folder", world / "whole")
    assert [line["step"] for line in log_of(world / "whole")] == [4, 8, 8]
    return world / "whole"


# where it is killed → whose n-th call does not come back
PLACES: dict[str, tuple[Any, str, int]] = {
    "in the first step": (Stepper, "batch", 2),
    "inside accumulation": (Stepper, "batch", 18),
    "inside a save": (Checkpoints, "_seal", 2),
    "between writing and placing": (Checkpoints, "_place", 2),
    "while pruning": (Checkpoints, "_prune", 2),
    "in the evaluation": (evaluation, "decode_prompts", 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_killed(place: str, world: Path, whole: Path, launch: Launch) -> None:
    with killed_at(*PLACES[place]):
        launch(*RECIPE)
    assert not (world / "run" / "heads").exists()
    launch(*RECIPE)
    same(whole, world / "run")
    left = [path.name for path in (world / "run").rglob("*") if path.name.startswith(".")]
    assert left == [], "nothing half done is left"


def test_killed_again_and_again(world: Path, whole: Path, launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    for call in (3, 18, 18):
        with killed_at(Stepper, "batch", call):
            launch(*RECIPE)
    launch(*RECIPE)
    assert re.findall(r"resumed: step (\d) of 8", capsys.readouterr().err) == ["3", "6"]
    same(whole, world / "run")


def test_killed_when_all_was_trained(world: Path, whole: Path, launch: Launch) -> None:
    """The report of a run that only had to write its heads says what was found before."""
    import train.train_heads as script

    with killed_at(script, "finish", 1):
        launch(*RECIPE)
    launch(*RECIPE)
    same(whole, world / "run")


def test_a_signal_in_an_evaluation(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again, counted and logged once, and what comes after is the same."""
    recipe = (*RECIPE, "--eval.every", 3, "--output.keep", 1)
    launch(*recipe, "--output.folder", world / "whole")
    original = evaluation.decode_prompts

    def stopped(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "decode_prompts", stopped)
        with pytest.raises(Interrupted, match="after step 3"):
            launch(*recipe)
    launch(*recipe)
    same(world / "whole", world / "run")


def test_optimizer_state_keeps_its_type(world: Path, whole: Path) -> None:
    """Steps are counted in float32, moments are as wide as the weights, and both are there for each of them."""
    state = load_file(whole / "checkpoints" / "step-00000008" / "optimizer.safetensors")
    heads = load_file(whole / "heads" / "heads.safetensors")
    assert {float(value) for name, value in state.items() if name.endswith(".step")} == {8.0}
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert len(state) == 3 * (len(heads) - 1), "all tensors but the map of the draft vocabulary are trained"


def test_what_changed_is_said(world: Path, launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    launch(*RECIPE, "--eval.prompts", 0)
    launch(*RECIPE, "--eval.prompts", 0, "--train.max_steps", 9)
    errors = capsys.readouterr().err
    assert "resumed: step 8 of 9" in errors and "changed: train.max_steps 8 → 9" in errors


def test_a_tied_target_with_a_reduced_draft_vocabulary(world: Path, launch: Launch) -> None:
    """The heads' own output matrix has as many rows as tokens they draft, whatever the target shares."""
    from tests.tiny import tiny_model
    from tests.train.world import VOCAB

    tied = tiny_model("llama", dtype=torch.float32, vocab=VOCAB, tie_word_embeddings=True)
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    (world / "tied").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (world / "target" / name).is_file():
            (world / "tied" / name).write_bytes((world / "target" / name).read_bytes())
    tied.save_pretrained(world / "tied")
    recipe = (
        "--target.name",
        world / "tied",
        "--heads.draft_vocab_size",
        16,
        "--eval.prompts",
        0,
        "--train.max_steps",
        3,
    )
    with killed_at(Stepper, "batch", 3):
        launch(*recipe, "--train.save_every", 1)
    report = launch(*recipe, "--train.save_every", 1)
    assert report["steps"] == 3
    assert load_file(world / "run" / "heads" / "heads.safetensors")["lm_head.weight"].shape == (16, 32)
