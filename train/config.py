"""What a run is made of: nested settings with one line of help each, and the section they belong to.

The dataclasses below are the whole schema. ``train/settings.py`` reads them from YAML and the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def knob(
    default: Any,
    text: str,
    choices: Sequence[str] = (),
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field with its help text, the values that a mode may take, and the bounds of a number."""
    bounds = {"or more": least, "above": above, "at most": most, "below": below}
    return field(default=default, metadata={"help": text, "choices": tuple(choices), "bounds": bounds})


def table(default: dict[str, Any], text: str) -> Any:
    """A field that maps names to values."""
    return field(default_factory=lambda: dict(default), metadata={"help": text, "choices": (), "bounds": {}})


DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class DataConfig:
    """Where the conversations come from and how the target's states are supplied."""

    train: str = knob(
        "builtin:train", "folder of `headstart data prepare`, file of conversations, several (A + B), or builtin:train"
    )
    heldout: str = knob("builtin:heldout", "the same for held-out conversations, or builtin:heldout")
    max_length: int = knob(1024, "longest conversation in tokens, when a file is prepared here", least=1)
    features: str = knob(
        "cached",
        "states of the target: computed once to disk, each step, or each step by processes that do nothing else",
        ("cached", "online", "workers"),
    )
    feature_dtype: str = knob(
        "bfloat16", "how the states are rounded, on disk and online alike", (*DTYPES, "float8_e4m3fn")
    )
    cache_folder: str | None = knob(None, "where cached states lie; default: features/ in headstart's cache folder")
    workers: int = knob(2, "with features: workers, how many each machine starts; 0: they are started by hand", least=0)
    spool_folder: str | None = knob(None, "where trainers and workers meet; on several machines, on a shared disk")
    ahead: int = knob(2, "optimizer steps ahead of the current one whose states are asked of workers", least=0)


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model."""

    name: str = knob("headstart/smollm2-135m-q4", "embedded name, folder or Hub id")
    revision: str | None = knob(None, "Hub revision")
    dtype: str = knob("bfloat16", "precision the target runs in", DTYPES)
    trust_remote_code: bool = knob(False, "run modelling code that comes with the target")
    adapter: str | None = knob(None, "LoRA to put on it, folder or Hub id: heads learn from the adapted target")
    adapter_revision: str | None = knob(None, "Hub revision of the adapter")
    quantization: str = knob(
        "none",
        "quantize its weights as it is loaded; heads learn from what it then says",
        ("none", "int8", "int4", "nf4"),
    )
    placement: str = knob(
        "outside",
        "in every process, in the module the engine is given, or its layers spread over the processes",
        ("outside", "inside", "sharded"),
    )


@dataclass(frozen=True)
class HeadsSection:
    """What is trained; unset values are the kind's own defaults."""

    kind: str = knob("eagle", "a kind of heads/kinds.py")
    lookahead: int | None = knob(None, "how many tokens deep the heads are trained to draft", least=1)
    taps: tuple[int, ...] | None = knob(None, "hidden_states indices of the target that the heads read")
    draft_vocab_size: int | None = knob(
        None, "most frequent answer tokens the heads can draft; unset: the whole vocabulary", least=1
    )
    draft_vocab_coverage: float | None = knob(
        None,
        "instead of a size: as many of the most frequent as make up this share of the answers, such as 0.95",
        above=0,
        most=1,
    )
    options: dict[str, Any] = table({}, "further options of the kind")  # noqa: RUF009
    init: str | None = knob(None, "heads to train further, folder or Hub id; they say what is not set here")
    allow_mismatch: bool = knob(False, "let heads.init be of another target, to adapt them to this one")
    lora: dict[str, Any] = table(  # noqa: RUF009
        {}, "train low-rank factors on heads.init alone: rank, alpha, modules (names, or all)"
    )


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    seed: int = knob(0, "of weights and order", least=0, most=2**32 - 1)
    precision: str = knob("bf16", "autocast of the heads", ("no", "bf16"))
    attention: str = knob("plain", "of the heads' unroll: plain, or torch's FlexAttention (GPUs)", ("plain", "flex"))
    kernels: str = knob("torch", "of target and heads: torch's, or Liger's fused ones (GPUs)", ("torch", "liger"))
    engine: str = knob("launched", "the one that was launched, or FSDP2 whatever was", ("launched", "fsdp2"))
    epochs: int = knob(1, "passes over the conversations", least=1)
    max_steps: int | None = knob(None, "stop after so many optimizer steps, however many epochs that takes", least=1)
    batch_tokens: int = knob(4096, "tokens of an optimizer step, over all processes and micro-batches", least=1)
    micro_tokens: int = knob(
        4096, "padded tokens a process holds at once; smaller uses less memory, same result", least=1
    )
    packing: bool = knob(False, "several conversations in a row; helps where lengths in a step differ much")
    bucket: int = knob(8, "optimizer steps whose conversations are sorted by length together; 1: fully random", least=1)
    lr: float = knob(5e-4, "highest learning rate", least=0)
    schedule: str = knob("cosine", "of the learning rate, in optimizer steps", ("cosine", "linear", "constant"))
    warmup_steps: int = knob(0, "optimizer steps of linear warm-up", least=0)
    final_lr: float = knob(0.0, "learning rate at the end as a share of lr", least=0)
    optimizer: str = knob(
        "adamw", "of all weights; or muon: of the matrices, beside AdamW for vocabularies and norms", ("adamw", "muon")
    )
    beta1: float = knob(0.9, "AdamW", least=0, below=1)
    beta2: float = knob(0.95, "AdamW", least=0, below=1)
    momentum: float = knob(0.95, "Muon", least=0, below=1)
    muon_factor: float = knob(1.0, "Muon's learning rate in those of AdamW, both of which the schedule scales", above=0)
    row_beta: float = knob(
        0.0, "Muon: memory of the rows' mean squares that even its steps (NorMuon); 0: plain Muon", least=0, below=1
    )
    weight_decay: float = knob(0.0, "of both, apart from the loss", least=0)
    clip: float = knob(1.0, "largest gradient norm; 0: none", least=0)
    loss: dict[str, float] = table({"soft_ce": 1.0}, "weight of each loss term (train/losses.py)")  # noqa: RUF009
    position_weights: tuple[float, ...] | None = knob(
        None, "weight of each draft position's loss, one each; unset: powers of the heads' position_decay"
    )
    log_every: int = knob(10, "optimizer steps between log lines", least=1)
    save_every: int = knob(0, "optimizer steps between checkpoints; 0: at evaluations and at the end only", least=0)


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation: the same loss, and real decoding."""

    every: int = knob(0, "optimizer steps between evaluations; 0: at the end only", least=0)
    conversations: int = knob(64, "held-out conversations for the training-side acceptance; 0: none", least=0)
    prompts: int = knob(8, "held-out prompts that are really decoded; 0: none", least=0)
    tokens: int = knob(64, "new tokens a prompt, fewer where the target has no more positions", least=1)
    lookahead: int | None = knob(None, "chain length while decoding; unset: the heads' own", least=1)


@dataclass(frozen=True)
class TrackerConfig:
    """Where curves go."""

    kind: str = knob("none", "tracker", ("none", "tensorboard", "wandb", "trackio"))
    project: str = knob("headstart", "project name there")
    run: str | None = knob(None, "run name there; default: the output folder's name")


@dataclass(frozen=True)
class OutputConfig:
    """What is written."""

    folder: str = knob("runs/heads", "run folder: heads/, checkpoints/, config.yaml, report.json")
    resume: bool = knob(True, "go on from the newest checkpoint of the folder; false: refuse a folder that has one")
    keep: int = knob(2, "newest checkpoints kept, beside the best one", least=1)
    export: str = knob("last", "which weights become heads/: the last, or the best by decoding", ("last", "best"))


@dataclass(frozen=True)
class RunConfig:
    """All sections of a recipe."""

    data: DataConfig = field(default_factory=DataConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    heads: HeadsSection = field(default_factory=HeadsSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
