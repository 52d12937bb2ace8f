"""What a trainer under measurement is given, and what it gives back; the same for ours and for every peer.

::

    hand-over folder   conversations.safetensors   ids, loss_mask (tokens,), starts (N + 1,), draft_ids (Vd,)
                       shape.json                  the heads to train: Shape
    states folder      hs_I.safetensors            the target's states, for trainers that read them from disk
    job.json           which of those, and the conversations of each optimizer step: Job
    result.json        seconds and tokens of each step, and what was really trained: written by Watch
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

CONVERSATIONS, SHAPE, RESULT = "conversations.safetensors", "shape.json", "result.json"
# the weights of EAGLE-3 as every trainer has them, once their prefixes are gone
WEIGHT = re.compile(r"(fc|norm|lm_head|fc_norm\.\d+|(layer\.)?\w+(_layernorm|_norm|_proj))\.weight")


@dataclass(frozen=True)
class Shape:
    """EAGLE-3 heads as every trainer must build them.

    Attributes:
        target: folder of the frozen target, as transformers loads it; ``target_dtype`` is what it runs in.
        taps: hidden states as transformers counts them.
        position_decay: weight of draft position j is this to the power j.
        fc_norm, norm_output: EAGLE-3.1's two norms.
    """

    target: str
    target_dtype: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    taps: list[int]
    lookahead: int
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    position_decay: float
    fc_norm: bool
    norm_output: bool


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        handover, states, out: folders; ``states`` is empty for trainers that run the target themselves.
        steps: numbers of the conversations of each optimizer step.
        precision: autocast of the heads, "bf16" or "no".
        optimizer: lr, warmup_steps, schedule, final_lr, weight_decay, beta1, beta2, clip.
        keep: write a checkpoint at the end.
        extra: what only one trainer is told.
    """

    handover: str
    states: str
    out: str
    steps: list[list[int]]
    precision: str
    optimizer: dict[str, Any]
    seed: int
    threads: int
    keep: bool
    extra: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """The job of a file that :meth:`write` made; sets the number of threads and seeds torch."""
        job = cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        torch.set_num_threads(job.threads)
        torch.manual_seed(job.seed)
        return job

    def write(self, path: Path) -> None:
        """As JSON."""
        write_json(path, asdict(self))

    def shape(self) -> Shape:
        """The heads to train."""
        return Shape(**json.loads((Path(self.handover) / SHAPE).read_text(encoding="utf-8")))


class Texts:
    """The conversations handed over; ``draft_ids`` (Vd,) are the tokens that can be drafted."""

    def __init__(self, folder: str | Path) -> None:
        held = load_file(Path(folder) / CONVERSATIONS)
        self._ids, self._mask, self._starts = held["ids"], held["loss_mask"].bool(), held["starts"].tolist()
        self.draft_ids = held["draft_ids"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def ids(self, index: int) -> Tensor:
        """(T,) int64."""
        return self._ids[self._starts[index] : self._starts[index + 1]]

    def loss_mask(self, index: int) -> Tensor:
        """(T,) bool, true where the token is one the target says."""
        return self._mask[self._starts[index] : self._starts[index + 1]]


def digest(steps: Iterable[Iterable[tuple[Tensor, Tensor]]]) -> str:
    """Hash of the (ids, loss mask) pairs of each step in order: equal where the same is trained."""
    found = hashlib.sha256()
    for step in steps:
        _add(found, step)
    return found.hexdigest()


def _add(found: Any, step: Iterable[tuple[Tensor, Tensor]]) -> None:
    for ids, mask in step:
        found.update(ids.to("cpu", torch.int64).numpy().tobytes())
        found.update(mask.to("cpu", torch.bool).numpy().tobytes() + b"|")
    found.update(b"\n")


def same_names(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A trainer's EAGLE-3 weights under names that all share; what is no weight of the heads is left out."""
    found = {}
    for name, weight in weights:
        name = re.sub(r"^(midlayer|layers\.0)\.", "layer.", name).replace("fc_norms.", "fc_norm.")
        name = re.sub(r"\b(self_attn|mlp)\.", "", name)
        if WEIGHT.fullmatch(name) and not name.startswith("verifier"):
            found[name] = weight
    return found


def described(
    heads: nn.Module, *, taps: Sequence[int], lookahead: int, draft_ids: Tensor, precision: str
) -> dict[str, Any]:
    """Of what kind heads are: equal for any two trainers that train the same."""
    held = same_names(heads.named_parameters())
    return {
        "weights": {name: list(weight.shape) for name, weight in sorted(held.items())},
        "dtypes": sorted({str(weight.dtype).removeprefix("torch.") for weight in held.values()}),
        "precision": precision,
        "taps": list(taps),
        "lookahead": lookahead,
        "draft_ids": hashlib.sha256(draft_ids.to("cpu", torch.int64).numpy().tobytes()).hexdigest(),
    }


class Watch:
    """Notes each step as it goes by: tell it what is given to the trainer, and when a step is done."""

    def __init__(self, job: Job) -> None:
        self.job, self._digest = job, hashlib.sha256()
        self._given: deque[tuple[int, int]] = deque()
        self.steps: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        """Training begins now."""
        self._since, self._busy = time.perf_counter(), time.process_time()

    def given(self, conversations: Sequence[tuple[Tensor, Tensor]]) -> None:
        """These (ids, loss mask) pairs make the next step."""
        _add(self._digest, conversations)
        self._given.append((sum(len(ids) for ids, _ in conversations), sum(int(m.sum()) for _, m in conversations)))

    def stepped(self, **figures: Any) -> None:
        """A step is done; ``figures`` are what the trainer says of it."""
        now, busy = time.perf_counter(), time.process_time()
        tokens, supervised = self._given.popleft()
        took = {"seconds": now - self._since, "processor": busy - self._busy}
        self.steps.append({**took, "tokens": tokens, "supervised": supervised, **figures})
        self._since, self._busy = now, busy

    def finish(
        self, heads: nn.Module, *, taps: Sequence[int], lookahead: int, draft_ids: Tensor, checkpoint: str, names: str
    ) -> None:
        """Write what was done, and of what kind the trained heads really are.

        Args:
            taps, lookahead, draft_ids: read off what the trainer built, not off the job.
            checkpoint: folder in ``out`` that holds the trained heads; empty for none.
            names: packages whose versions are recorded, apart by blanks.
        """
        made = described(heads, taps=taps, lookahead=lookahead, draft_ids=draft_ids, precision=self.job.precision)
        held = same_names(heads.named_parameters())
        result = {
            "made": made,
            "frozen": sorted(name for name, weight in held.items() if not weight.requires_grad),
            "data": self._digest.hexdigest(),
            "steps": self.steps,
            "checkpoint": checkpoint,
            "versions": {name: importlib.metadata.version(name) for name in names.split()},
        }
        write_json(Path(self.job.out) / RESULT, result)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
