"""What stops a run: numbers that are not finite, memory that ran out, a target that is not as asked, a used folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train.loop as loop
from tests.train.conftest import Launch
from tests.train.world import log_of, run, tiny_target
from train.files import held
from train.guards import OutOfMemory, check_target, memory_advice
from train.ranks import Ranks
from train.step import Stepper


def spoiling(factor: float, step: int, monkeypatch: pytest.MonkeyPatch, gradient_only: bool = False) -> None:
    """In one step losses are off by ``factor`` times the logits' sum, or only their gradients are."""
    original, run_step, now = loop.make_criterion, Stepper.run, [0]

    def watched(self: Stepper, share: Any, total: float, number: int, *rest: Any) -> None:
        now[0] = number
        run_step(self, share, total, number, *rest)

    def make(weights: Any) -> Any:
        right = original(weights)

        def criterion(draft: torch.Tensor, teacher: Any) -> dict[str, torch.Tensor]:
            values, extra = right(draft, teacher), draft.sum(-1) * factor
            if now[0] != step:
                return values
            # infinity minus itself is no zero: its gradient alone is scaled where the value is to stay
            extra = Scaled.apply(draft.sum(-1) * 0, factor) if gradient_only else extra
            return {"soft_ce": values["soft_ce"] + extra}

        return criterion

    monkeypatch.setattr(Stepper, "run", watched)
    monkeypatch.setattr(loop, "make_criterion", make)


class Scaled(torch.autograd.Function):
    """A value whose gradient is times a factor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return outer[0] * ctx.factor, None


@pytest.mark.parametrize(("factor", "said"), [(float("nan"), "nan"), (float("inf"), "nan|inf")])
def test_a_loss_that_is_not_finite_stops_with_its_rows(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, factor: float, said: str
) -> None:
    spoiling(factor, 4, monkeypatch)
    with pytest.raises(
        ValueError, match=rf"the loss of step 4 is not finite \(-?({said})\), so the step was not taken"
    ):
        launch("--train.save_every", 1, "--eval.conversations", 0, "--eval.prompts", 0)
    assert [line["step"] for line in log_of(world / "run")] == [1, 2, 3]
    kept = json.loads((world / "run" / "not-finite-step-4.json").read_text())
    batches = kept["batches"]
    assert (kept["step"], kept["what"], batches[0]["process"], batches[0]["micro_batch"]) == (4, "loss", 0, 1)
    rows = [row for batch in batches for row in batch["rows"]]
    places = {f"train.jsonl:{line}" for line in range(1, 25)}
    assert len(rows) == len(set(rows)) >= 2 and set(rows) <= places
    assert not (world / "run" / "heads").exists()
    weights = load_file(world / "run" / "checkpoints" / "step-00000003" / "heads" / "heads.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())


def test_the_rows_are_in_the_message(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiling(float("nan"), 1, monkeypatch)
    with pytest.raises(ValueError, match=r"Rows of the batch: train\.jsonl:\d+, train\.jsonl:\d+.*all are in .*step-1"):
        launch("--train.batch_tokens", 4000, "--train.micro_tokens", 4000)


def test_a_gradient_that_is_not_finite_moves_nothing(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is what it was; only its gradient is not. AdamW would have made every weight NaN."""
    seen: list[loop.Trainer] = []
    original = loop.Trainer.run

    def watched(self: loop.Trainer) -> None:
        seen.append(self)
        original(self)

    monkeypatch.setattr(loop.Trainer, "run", watched)
    spoiling(float("nan"), 1, monkeypatch, gradient_only=True)
    for clip in (1.0, 0.0):
        with pytest.raises(
            ValueError, match=r"the gradient of step 1 is not finite \(finite loss\), so the step was not taken"
        ):
            launch("--train.clip", clip)
        assert all(bool(p.isfinite().all()) for p in seen[-1].heads.parameters())


def test_the_gradient_norm_is_what_torch_says(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logged before clipping; clipping to 0.5 moves along a gradient of that norm."""
    found: list[tuple[float, float]] = []
    original = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *arguments: Any, **options: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        found.append((float(torch.cat([g.flatten() for g in gradients if g is not None]).norm()), 0.0))
        return original(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    launch("--train.clip", 0.5, "--eval.prompts", 0, "--train.max_steps", 3, "--output.folder", world / "clipped")
    clipped = [norm for norm, _ in found]
    assert clipped == pytest.approx([0.5] * 3, rel=1e-3)
    found.clear()
    launch("--train.clip", 0, "--eval.prompts", 0, "--train.max_steps", 3, "--output.folder", world / "free")
    free = [line["train/grad_norm"] for line in log_of(world / "free") if "train/grad_norm" in line]
    assert free == pytest.approx([norm for norm, _ in found], rel=1e-5) and min(free) > 0.5
    logged = [line["train/grad_norm"] for line in log_of(world / "clipped") if "train/grad_norm" in line]
    assert logged[0] == pytest.approx(free[0], rel=1e-6), "before it was clipped"


def test_two_processes_stop_together(world: Path) -> None:
    """A learning rate that ruins the weights: both end with status 2, soon, and both name their rows."""
    settings = ["--train.lr", "1e30", "--train.clip", "0", "--eval.prompts", "0", "--eval.conversations", "0"]
    done = run(["--config", world / "recipe.yaml", *settings], processes=2, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("error: the loss of step") == 2 and "train/loop.py" not in done.stderr
    (kept,) = (world / "run").glob("not-finite-step-*.json")
    assert {batch["process"] for batch in json.loads(kept.read_text())["batches"]} == {0, 1}


# memory


def test_memory_that_ran_out_says_what_to_lower(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.step.Step.forward", lambda *_: torch.empty(1 << 50))
    with pytest.raises(
        OutOfMemory,
        match=r"out of memory in step 1, in a pass over \d+ conversations of up to \d+ tokens \(\d+ padded\): "
        r"lower train\.micro_tokens \(now 160; the result stays the same\)",
    ):
        launch()


def test_memory_that_ran_out_in_an_evaluation(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.loop.evaluate", lambda *_: torch.empty(1 << 50))
    with pytest.raises(OutOfMemory, match=r"in the evaluation at step 2: lower train\.micro_tokens or eval\.tokens"):
        launch("--train.max_steps", 2)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_every_way_to_run_out(error: BaseException) -> None:
    with pytest.raises(OutOfMemory, match="out of memory here: lower that"), memory_advice("here", "lower that"):
        raise error


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_advice("here", "lower that"):
        raise RuntimeError("shapes do not fit")


# the target


def test_a_target_as_asked_passes() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check_target(tiny_target(dtype), dtype)


def test_a_target_in_another_dtype_is_named() -> None:
    target = tiny_target(torch.float32)
    with pytest.raises(
        ValueError, match=r"tiny was asked for in bfloat16, but model\.embed_tokens\.weight is float32 and"
    ):
        check_target(target, torch.bfloat16)
    target = tiny_target(torch.bfloat16)
    target.model.model.layers[2].mlp.up_proj.float()
    with pytest.raises(ValueError, match=r"but model\.layers\.2\.mlp\.up_proj\.weight is float32: set target\.dtype"):
        check_target(target, torch.bfloat16)
    target.model._keep_in_fp32_modules = ["up_proj"]  # the model's own wish is none of a fault
    check_target(target, torch.bfloat16)


def test_a_target_with_dropout_on_is_named(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    target.model.model.layers[1].train()
    with pytest.raises(
        ValueError, match=r"tiny is in train mode \(model\.layers\.1 and others\), so dropout may be on"
    ):
        check_target(target, torch.float64)
    original = loop.Trainer.__init__

    def switched_on(self: loop.Trainer, config: Any, accelerator: Any, heads: Any, *rest: Any) -> None:
        heads.target.model.train()
        original(self, config, accelerator, heads, *rest)

    monkeypatch.setattr(loop.Trainer, "__init__", switched_on)
    with pytest.raises(ValueError, match="is in train mode"):
        launch()


def test_a_target_that_would_learn_is_named() -> None:
    target = tiny_target()
    target.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"tiny is not frozen \(model\.norm\.weight takes gradients\)"):
        check_target(target, torch.float64)


# the folder


def test_two_runs_do_not_share_a_folder(world: Path, launch: Launch) -> None:
    with (
        held(world / "run", Ranks()),
        pytest.raises(OSError, match=r"starting in .*run failed: another run is at work there"),
    ):
        launch()
    launch("--eval.prompts", 0, "--train.max_steps", 1)  # it was let go


def test_a_child_does_not_hold_the_folder(tmp_path: Path) -> None:
    """A worker that outlives its killed parent would lock the next run out."""
    read, write = os.pipe()
    there, here = os.pipe()
    with held(tmp_path, Ranks()):
        child = os.fork()
        if child == 0:
            os.write(here, b".")
            os.read(read, 1)  # until the parent has let go, and has tried again
            os._exit(0)
        os.read(there, 1)
    try:
        with held(tmp_path, Ranks()):
            pass
    finally:
        os.write(write, b".")
        os.waitpid(child, 0)
