"""Packed against padded rows (``train.packing``): tokens a second of the same training, measured in one go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from data.pack import plan
from train.assemble import load_conversations, make_features, make_heads
from train.batches import split_step
from train.config import RunConfig
from train.evaluation import spread
from train.launch import start
from train.loop import Trainer
from train.progress import Reporter
from train.ranks import Ranks
from train.speed import aside, time_epoch
from train.targets import load_target

WAYS = {"padded": False, "packed": True}


@dataclass(frozen=True)
class PackingSpeed:
    """What was measured, each way.

    Attributes:
        tokens: of all epochs.
        places: rows × length of all passes of all epochs: tokens and padding.
        seconds: of each epoch.
    """

    tokens: int
    places: dict[str, int]
    seconds: dict[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        """Figures for JSON; ``ratio`` is how many times as fast packed rows are."""
        spent = {way: sum(times) for way, times in self.seconds.items()}
        return {
            "epochs": len(self.seconds["padded"]),
            "tokens": self.tokens,
            "tokens_per_second": {way: self.tokens / seconds for way, seconds in spent.items()},
            "padding": {way: 1 - self.tokens / places for way, places in self.places.items()},
            "seconds": self.seconds,
            "ratio": spent["padded"] / spent["packed"],
        }

    def to_text(self) -> str:
        """For people."""
        found = self.to_dict()
        lines = [f"{found['epochs']} epochs, {self.tokens:,} tokens each way"]
        for way, rate in found["tokens_per_second"].items():
            lines.append(f"  {way}   {rate:8,.0f} tokens/s   {found['padding'][way]:6.1%} padding")
        return "\n".join([*lines, f"  packed is {found['ratio']:.2f} times as fast"])


def measure_packing(config: RunConfig, conversations: int, epochs: int, reporter: Reporter) -> PackingSpeed:
    """Train twice from the same start on some of the recipe's conversations, epochs in turn and by turns first.

    The states are cached or online as the recipe says; a cache is built anew, in a folder that is removed afterwards.

    Raises:
        ValueError, OSError: as training does; a target that cannot read packed rows, where states are online.
    """
    with aside(config) as quiet:
        return _measure(quiet, conversations, epochs, reporter)


def _measure(config: RunConfig, conversations: int, epochs: int, reporter: Reporter) -> PackingSpeed:
    accelerator, silent = start(config), Reporter(False)
    ranks, target = Ranks(accelerator), load_target(config, accelerator)
    every = load_conversations(config, "train", target, ranks, silent)
    some = every.select(spread(len(every), conversations))
    trainers = {}
    for way, packing in WAYS.items():
        data = replace(config.data, cache_folder=config.output.folder)
        own = replace(config, data=data, train=replace(config.train, packing=packing))
        heads = make_heads(own, target, some, silent)
        source = make_features(own, heads, some, ranks, silent)
        trainers[way] = Trainer(own, accelerator, heads, source, None, silent)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    places = dict.fromkeys(WAYS, 0)
    for epoch in range(epochs):
        for way in list(WAYS)[:: -1 if epoch % 2 else 1]:
            places[way] += _places(trainers[way], epoch)
            seconds[way].append(time_epoch(trainers[way], epoch))
        told = ", ".join(f"{way} {times[-1]:.1f} s" for way, times in seconds.items())
        reporter.say(f"epoch {epoch + 1}/{epochs}: {told}")
    return PackingSpeed(epochs * int(some.lengths.sum()), places, seconds)


def _places(trainer: Trainer, epoch: int) -> int:
    """Rows × length of an epoch's passes."""
    settings, lengths, found = trainer.config.train, trainer.lengths, 0
    for step in trainer.plan(epoch):
        for micro in split_step(step, lengths, settings.micro_tokens, 1, packing=settings.packing)[0]:
            own = lengths[list(micro.indices)].tolist()
            rows = len(plan(own, max(own))) if settings.packing else len(own)
            found += rows * max(own)
    return found
