"""One recipe trained once for each of several losses, and what the heads are worth afterwards.

Everything but ``train.loss`` is the same: first weights, states, order, steps. Losses themselves cannot be compared,
what is accepted can: on held-out conversations, by greedy choice (``accepted``) and by sampling (``overlap``, the mean
of Σ min(P, q) at a position), and in real decoding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.assemble import load_conversations, make_features, make_heads
from train.config import RunConfig
from train.launch import start
from train.loop import Trainer
from train.losses import TERMS, make_criterion
from train.progress import Reporter
from train.ranks import Ranks
from train.settings import SettingsError
from train.targets import load_target

LOSSES = tuple(TERMS)


@dataclass(frozen=True)
class Row:
    """What one loss gave.

    Attributes:
        loss: as it was asked for.
        acceptance: held out, by draft position: arg-max is the target's here and at all earlier positions.
        overlap: held out, by draft position: what sampling one token would accept.
        tokens_per_round, loop_free, rounds: of real decoding; None where no prompts are decoded.
        seconds: of training.
    """

    loss: str
    acceptance: list[float]
    overlap: list[float]
    tokens_per_round: float | None
    loop_free: float | None
    rounds: int | None
    seconds: float


def parse_loss(text: str) -> dict[str, float]:
    """``soft_ce``, or several with weights: ``hard_ce=0.1,tv=1.8``.

    Raises:
        SettingsError: no such term, or a weight that is no number.
    """
    weights = {}
    for part in text.split(","):
        name, given, weight = part.partition("=")
        try:
            weights[name.strip()] = float(weight) if given else 1.0
        except ValueError:
            raise SettingsError(f"--loss {text}: {weight!r} is no weight") from None
    make_criterion(weights)
    return weights


def compare(config: RunConfig, losses: Sequence[str], reporter: Reporter) -> list[Row]:
    """Train the recipe once for each loss, in folders of ``output.folder`` that carry their names; one that is there
    with its last checkpoint is not trained again.

    Raises:
        SettingsError: a loss that there is not, or an evaluation that shows nothing.
        ValueError, OSError: as training does.
    """
    if not config.eval.conversations:
        raise SettingsError("eval.conversations is 0: losses are compared on held-out conversations")
    parsed = {name: parse_loss(name) for name in losses}
    accelerator = start(config)
    ranks, silent = Ranks(accelerator), Reporter(False)
    target = load_target(config, accelerator)
    conversations = load_conversations(config, "train", target, ranks, reporter)
    unseen = load_conversations(config, "heldout", target, ranks, reporter)
    states = heldout = None
    rows = []
    for name, weights in parsed.items():
        folder = Path(config.output.folder) / name.replace(",", "+")
        one = replace(
            config,
            train=replace(config.train, loss=weights),
            output=replace(config.output, folder=str(folder)),
            tracker=replace(config.tracker, kind="none"),
        )
        heads = make_heads(one, target, conversations, silent)
        states = states or make_features(one, heads, conversations, ranks, reporter)
        heldout = heldout or make_features(one, heads, unseen, ranks, reporter)
        trainer = Trainer(one, accelerator, heads, states, heldout, reporter)
        reporter.say(f"── {name}")
        began = time.monotonic()
        trainer.resume()
        trainer.run()
        assert trainer.progress.evaluation is not None
        rows.append(_row(name, trainer.progress.evaluation, time.monotonic() - began))
    return rows


def _row(name: str, found: dict[str, Any], seconds: float) -> Row:
    """Of what the last evaluation found, as a checkpoint keeps it."""
    taught, decoded = found["heldout"], found["decoded"] or {}
    depth = sum(key.startswith("heldout/acceptance/") for key in taught)
    acceptance, overlap = (
        [taught[f"heldout/{figure}/{k}"] for k in range(1, depth + 1)] for figure in ("acceptance", "overlap")
    )
    return Row(
        loss=name,
        acceptance=acceptance,
        overlap=overlap,
        tokens_per_round=decoded.get("tokens_per_round"),
        loop_free=decoded.get("loop_free"),
        rounds=decoded.get("rounds"),
        seconds=round(seconds, 1),
    )


def to_dict(config: RunConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """For JSON, with what the rows have in common."""
    train = config.train
    return {
        "target": config.target.name,
        "kind": config.heads.kind,
        "max_steps": train.max_steps,
        "epochs": train.epochs,
        "batch_tokens": train.batch_tokens,
        "lr": train.lr,
        "seed": train.seed,
        "rows": [asdict(row) for row in rows],
    }


def to_text(rows: Sequence[Row]) -> str:
    """A table for people."""
    width = max(len(row.loss) for row in rows)
    depth = len(rows[0].acceptance)
    wide = max(6 * depth - 1, 8)
    head = f"{'loss':{width}}  {'accepted':{wide}}  {'overlap':{wide}}  {'τ':>6}  {'loop-free':>9}  {'rounds':>6}"
    lines = [f"{head}  {'seconds':>7}"]
    for row in rows:
        accepted, overlap = (" ".join(f"{v:.3f}" for v in values) for values in (row.acceptance, row.overlap))
        decoded = f"{'–':>6}  {'–':>9}  {'–':>6}"
        if row.tokens_per_round is not None and row.loop_free is not None:
            decoded = f"{row.tokens_per_round:6.3f}  {row.loop_free:9.3f}  {row.rounds:6d}"
        lines.append(f"{row.loss:{width}}  {accepted:{wide}}  {overlap:{wide}}  {decoded}  {row.seconds:7.1f}")
    return "\n".join(lines)
