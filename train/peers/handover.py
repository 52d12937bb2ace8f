"""What every trainer is handed in files: our prepared conversations, the heads' shape, and the target's states."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.base import DraftHeads
from heads.embedded import resolve
from heads.target import Target
from train.assemble import load_conversations, make_heads
from train.batches import by_length
from train.cache_build import BUILD_TOKENS
from train.config import RunConfig
from train.conversations import Conversations
from train.evaluation import spread
from train.features import pad_ids
from train.launch import start
from train.peers.inside.job import CONVERSATIONS, SHAPE, Shape, write_json
from train.progress import Reporter
from train.ranks import Ranks
from train.settings import to_yaml
from train.targets import load_target

RECIPE, SECONDS = "recipe.yaml", "seconds.json"


@dataclass(frozen=True)
class Handover:
    """A folder that trainers read, and what lies in it."""

    folder: Path
    config: RunConfig
    conversations: Conversations
    heads: DraftHeads

    @property
    def target(self) -> Target:
        """The frozen target."""
        return self.heads.target


def hand_over(config: RunConfig, count: int | None, folder: Path, reporter: Reporter) -> Handover:
    """Write conversations, shape and recipe into ``folder``; the target's states are written where they are needed.

    Args:
        config: a recipe of kind ``eagle``.
        count: how many of its training conversations, evenly spread; None for all.

    Raises:
        ValueError: another kind, or an adapted or quantized target; and see :func:`train.assemble.load_conversations`.
    """
    if config.heads.kind != "eagle":
        raise ValueError(f"heads.kind is {config.heads.kind}: peers train EAGLE-3, so the recipe's must be eagle")
    if config.target.adapter or config.target.quantization != "none":
        raise ValueError(f"{config.target.name} is adapted or quantized here: peers load a target as it stands")
    accelerator = start(config)
    target = load_target(config, accelerator)
    every = load_conversations(config, "train", target, Ranks(accelerator), reporter)
    some = every if count is None else every.select(spread(len(every), count))
    heads = make_heads(config, target, some, reporter)
    folder.mkdir(parents=True, exist_ok=True)
    ids = heads.draft_ids
    rows = range(len(some))
    held = {
        "ids": torch.cat([some.ids(i) for i in rows]),
        "loss_mask": torch.cat([some.loss_mask(i) for i in rows]).to(torch.uint8),
        "starts": torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(some.lengths).cumsum(0)]),
        "draft_ids": torch.arange(target.vocab_size) if ids is None else ids.to("cpu", torch.int64),
    }
    save_file(held, folder / CONVERSATIONS)
    write_json(folder / SHAPE, dataclasses.asdict(shape_of(heads)))
    (folder / RECIPE).write_text(to_yaml(config), encoding="utf-8")
    return Handover(folder, config, some, heads)


def shape_of(heads: DraftHeads) -> Shape:
    """The heads as other trainers are told of them.

    Raises:
        ValueError: the target does not say how long its texts may be.
    """
    target, own = heads.target, heads.config
    if target.max_positions is None:
        raise ValueError(f"{target.name} has no max_position_embeddings, which the peers' layers need")
    folder = Path(resolve(target.name))
    layer = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
    further = ("rope_theta", "position_decay", "fc_norm", "norm_output")
    return Shape(
        target=str(folder.resolve()) if folder.is_dir() else target.name,
        target_dtype=str(target.dtype).removeprefix("torch."),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        taps=list(own.taps),
        lookahead=own.lookahead,
        draft_vocab_size=own.draft_vocab_size or target.vocab_size,
        **{name: own.options[name] for name in (*layer, *further)},
    )


def write_states(handover: Handover, root: Path) -> tuple[Path, float]:
    """The target's states, a safetensors file a conversation, in a folder under ``root`` named by what is in it.

    Each holds ``token_ids`` (T,) and ``hidden_states`` (T, taps + 1, H): the taps, and the last layer's output before
    the final norm, which is how the speculators library stores them.

    Returns:
        The folder, and the seconds that it took to make, now or before.

    Raises:
        OSError: not enough room on the disk (told before anything is computed), or writing failed.
    """
    target, texts = handover.target, handover.conversations
    taps, dtype = handover.heads.config.taps, getattr(torch, handover.config.data.feature_dtype)
    key = [texts.digest, target.identity().weights, str(target.dtype), list(taps), str(dtype)]
    folder = root / f"states-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder, float(json.loads((folder / SECONDS).read_text(encoding="utf-8"))["seconds"])
    root.mkdir(parents=True, exist_ok=True)
    size = int(texts.lengths.sum()) * (len(taps) + 1) * target.hidden_size * dtype.itemsize
    room = shutil.disk_usage(root).free
    if size > room:
        raise OSError(f"the target's states need {size / 2**30:.2f} GiB in {root}, where {room / 2**30:.2f} are free")
    began = time.perf_counter()
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    try:
        for group in by_length(texts.lengths, BUILD_TOKENS):
            ids, states = _run_target(handover, group, dtype)
            for row, index in enumerate(group):
                length = int(texts.lengths[index])
                held = {"token_ids": ids[row, :length].cpu(), "hidden_states": states[row, :length].cpu()}
                save_file({name: part.contiguous() for name, part in held.items()}, partial / f"hs_{index}.safetensors")
        seconds = time.perf_counter() - began
        write_json(partial / SECONDS, {"seconds": seconds})
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError:  # made by another meanwhile
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder, seconds


def _run_target(handover: Handover, group: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids (B, T) and states (B, T, taps + 1, H) of some conversations."""
    target, found = handover.target, []

    def keep(module: object, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    hook = target.layers[-1].register_forward_hook(keep)
    try:
        ids = pad_ids(handover.conversations, group)[0].to(target.device)
        taps = handover.heads.config.taps
        out = target.forward(ids, taps=taps, logits_to_keep=1)
    finally:
        hook.remove()
    assert out.taps is not None
    states = torch.cat([out.taps, found[0]], -1).unflatten(-1, (len(taps) + 1, target.hidden_size))
    return ids, states.to(dtype)
