"""Checkpoints that are whole or not there, and the state a run goes on from.

    checkpoints/step-00000200/   heads/               loads like any heads folder
                                 optimizer.safetensors  (or DeepSpeed's own files)
                                 random-0.safetensors   generator states, one file a process
                                 progress.json          step, place in the data, best so far, settings

Everything is written to a hidden folder beside and renamed at the end. There is no stored schedule and no stored
order: both follow from the settings and the numbers in progress.json.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import DraftHeads
from heads.store import WEIGHTS, read_tensors
from train.ranks import Ranks

PROGRESS = "progress.json"


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        step: optimizer steps done.
        epoch, batch: the next step's place in the data.
        best, best_step: highest decoded tokens per round of an evaluation so far, and the step it was at.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = 0.0
    best_step: int = -1


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: the run folder's ``checkpoints``.
        model, optimizer: as ``Accelerator.prepare`` returned them.
        heads: the heads inside the model.
        settings: what must be equal for a run to be continued; stored with each checkpoint.
        keep: newest checkpoints to keep, beside the best.
    """

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        heads: DraftHeads,
        settings: dict[str, Any],
        keep: int,
    ) -> None:
        self.folder, self.heads, self.settings, self.keep = folder, heads, settings, max(1, keep)
        self.ranks = Ranks(accelerator)
        self._model, self._optimizer = model, optimizer
        self._deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED

    def at(self, step: int) -> Path:
        """Folder of the checkpoint at ``step``, whether it exists or not."""
        return self.folder / f"step-{step:08d}"

    def newest(self) -> Path | None:
        """The checkpoint of the highest step."""
        return max((path.parent for path in self.folder.glob(f"step-*/{PROGRESS}")), default=None)

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint; all processes call it. One that is there already is left as it is.

        Raises:
            OSError: on every process, when it failed on any; nothing of it is left then, older ones are untouched.
        """
        place = self.at(progress.step)
        if self.ranks.share(place.exists()):
            return place
        partial = place.with_name(f".{place.name}.partial")
        self._together(lambda: self._start(partial), f"writing checkpoint {place}", partial)
        self._together(lambda: self._write(partial, progress), f"writing checkpoint {place}", partial)
        self._together(lambda: partial.rename(place) if self.ranks.main else None, f"placing {place}", partial)
        self._prune(progress.best_step)
        return place

    def _together(self, action: Any, doing: str, partial: Path) -> None:
        """Run ``action`` everywhere; if it fails anywhere, remove what was written and raise everywhere."""
        error: Exception | None = None
        try:
            action()
        except Exception as caught:  # a full disk shows as one of several types, by library
            error = caught
        try:
            self.ranks.all_succeed(error, doing)
        except OSError:
            if self.ranks.main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _start(self, partial: Path) -> None:
        if self.ranks.main:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it wrote
            partial.mkdir(parents=True)

    def _write(self, partial: Path, progress: Progress) -> None:
        save_file(_generator_states(), partial / f"random-{self.ranks.index}.safetensors")
        if self._deepspeed:
            self._model.save_checkpoint(str(partial / "deepspeed"), tag="state")
        if not self.ranks.main:
            return
        self.heads.save_pretrained(partial / "heads")
        if not self._deepspeed:
            save_file(_flatten(self._optimizer.state_dict()["state"]), partial / "optimizer.safetensors")
        content = {"progress": asdict(progress), "processes": self.ranks.count, "settings": self.settings}
        (partial / PROGRESS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _prune(self, best_step: int) -> None:
        if self.ranks.main:
            there = sorted(self.folder.glob(f"step-*/{PROGRESS}"))
            for path in there[: -self.keep]:
                if path.parent != self.at(best_step):
                    shutil.rmtree(path.parent)
        self.ranks.wait()

    def load(self, place: Path) -> Progress:
        """Put weights, optimizer and generators back, on all processes.

        Raises:
            ValueError: the checkpoint is of a run with other settings (they are named), or is damaged.
        """
        content = json.loads((place / PROGRESS).read_text(encoding="utf-8"))
        differing = differences(content["settings"], self.settings)
        if differing:
            raise ValueError(
                f"{place} is of a run with other settings ({'; '.join(differing)}): "
                "set them back to go on with it, or set output.folder to a new folder"
            )
        if self._deepspeed:
            if content["processes"] != self.ranks.count:
                raise ValueError(f"{place} is DeepSpeed's, of {content['processes']} processes: go on with as many")
            self._model.load_checkpoint(str(place / "deepspeed"), tag="state")
        else:
            self.heads.load_state_dict(read_tensors(place / "heads" / WEIGHTS, self.heads.state_dict()))
            groups = self._optimizer.state_dict()["param_groups"]
            state = _unflatten(load_file(place / "optimizer.safetensors"))
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        random = place / f"random-{self.ranks.index}.safetensors"
        if random.is_file():  # there are fewer when the run goes on with more processes
            _restore_generators(load_file(random))
        return Progress(**content["progress"])


def differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """``section.key a → b`` for each setting that changed."""
    names = sorted(stored.keys() | now.keys())
    return [f"{n} {stored.get(n)!r} → {now.get(n)!r}" for n in names if stored.get(n) != now.get(n)]


def _flatten(state: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{i}.{name}": value.cpu().contiguous() for i, entry in state.items() for name, value in entry.items()}


def _unflatten(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    return state


def _generator_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
