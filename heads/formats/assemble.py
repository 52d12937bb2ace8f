"""From a plan to heads: names and shapes are compared first, all faults are listed, then the values are read."""

from __future__ import annotations

import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.config import HeadsConfig
from heads.formats.checkpoint import Checkpoint
from heads.formats.format import FLOATS, FormatError, Plan, listed
from heads.kinds import build, kind_of, make_config
from heads.target import Target


def assemble(checkpoint: Checkpoint, target: Target, plan: Plan) -> DraftHeads:
    """Heads on a target, in the widest dtype of the checkpoint.

    Raises:
        FormatError: tensors are missing, unexpected, of another shape, no floats or not finite.
        ConfigError: a setting that no heads of this kind can have.
    """
    config = make_config(
        plan.kind,
        target,
        lookahead=plan.lookahead,
        taps=plan.taps,
        draft_vocab_size=None if plan.target_ids is None else plan.target_ids.shape[0],
        options=plan.options,
    )
    if problems := _problems(checkpoint, plan, _shapes(config, target)):
        raise FormatError(f"{checkpoint.path} does not fit {plan.kind} heads on {target.name}: {'; '.join(problems)}")
    dtype = max((checkpoint.entries[name].dtype for name in plan.names.values()), key=lambda dtype: dtype.itemsize)
    heads = build(config, target).to(device=target.device, dtype=dtype)
    if plan.target_ids is not None:
        heads.set_draft_vocabulary(plan.target_ids)
    with torch.no_grad():
        for name, parameter in heads.state_dict().items():
            if name in plan.names:
                parameter.copy_(_values(checkpoint, plan, name))
            elif name in plan.zeros:
                parameter.zero_()
    return heads.eval()


def _shapes(config: HeadsConfig, target: Target) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that such heads have, without making them: the sizes come from a file."""
    with torch.device("meta"):
        state = kind_of(config.kind)(config, target).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name != "target_ids"}


def _problems(checkpoint: Checkpoint, plan: Plan, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    entries, problems = checkpoint.entries, []
    missing = [theirs for theirs in plan.names.values() if theirs not in entries]
    unexpected = entries.keys() - set(plan.names.values()) - plan.also
    if missing:
        problems.append(f"missing {listed(missing)}")
    if unexpected:
        problems.append(f"unexpected {listed(unexpected)}")
    if beyond := shapes.keys() - plan.names.keys() - plan.zeros:
        problems.append(f"nothing for {listed(beyond)}")
    for ours, theirs in plan.names.items():
        entry = entries.get(theirs)
        if entry is None:
            continue
        shape = (len(plan.order[ours]), *entry.shape[1:]) if ours in plan.order else entry.shape
        if shape != shapes.get(ours):
            problems.append(f"{theirs} is {shape} where {shapes.get(ours)} is expected")
        if entry.dtype not in FLOATS:
            problems.append(f"{theirs} is stored as {str(entry.dtype).removeprefix('torch.')}, not as floats")
    return problems


def _values(checkpoint: Checkpoint, plan: Plan, name: str) -> Tensor:
    value = checkpoint.load(plan.names[name])
    if not bool(value.isfinite().all()):
        raise FormatError(f"{checkpoint.path}: {plan.names[name]} holds values that are not finite")
    return value[plan.order[name]] if name in plan.order else value
