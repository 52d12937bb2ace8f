"""A draft model of a target's first layers, and how it is taught: by the target's whole distribution at each token."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.target import Target
from train.features import LOGIT_ROWS
from train.losses import cross_entropy


@dataclass
class Judged:
    """Sums over answer tokens: cross-entropy with the target's distribution, and how often both like a token best."""

    loss: float = 0.0
    agreed: int = 0
    count: int = 0

    def add(self, other: Judged) -> None:
        """Take another batch's sums in."""
        self.loss += other.loss
        self.agreed += other.agreed
        self.count += other.count

    def to_dict(self) -> dict[str, float]:
        """Loss a token, in nats, and agreement, the greedy acceptance of a draft's first token."""
        return {"loss": self.loss / self.count, "agreement": self.agreed / self.count, "tokens": self.count}


def first_layers(target: Target, layers: int) -> Any:
    """A model of the target's kind with copies of its first layers, in float32; embedding and output are frozen.

    Raises:
        ValueError: not fewer layers than the target has, or a target that is adapted, quantized or part of another.
    """
    model: Any = target.model
    kind = type(model).__name__
    if not 0 < layers < target.num_layers:
        raise ValueError(f"a draft model of {target.name} has 1 to {target.num_layers - 1} layers, not {layers}")
    if hasattr(model, "get_base_model") or getattr(model.config, "quantization_config", None):
        raise ValueError(f"{target.name} is adapted or quantized: its layers cannot be copied, merge or dequantize it")
    if target.config is not model.config:
        raise ValueError(f"the language model of {kind} is part of a larger one: name the language model alone")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = list(target.layer_types[:layers])
    prefix = next(name for name, module in model.named_modules() if module is target.layers) + "."
    kept = {
        name: weight
        for name, weight in model.state_dict().items()
        if not (name.startswith(prefix) and int(name.removeprefix(prefix).split(".")[0]) >= layers)
    }
    draft = type(model)(config).float()
    draft.load_state_dict(kept)
    draft.generation_config = copy.deepcopy(model.generation_config)
    for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        module.requires_grad_(False)
    return draft


def judge(draft: Any, target: Target, ids: Tensor, loss_mask: Tensor, *, learn: bool) -> Judged:
    """Compare draft and target where the next token is the target's own; ``learn`` adds the mean loss's gradient.

    Args:
        ids, loss_mask: (B, T), padded on the right.
    """
    rows = torch.zeros_like(loss_mask)
    rows[:, :-1] = loss_mask[:, 1:]
    taught = target.forward(ids, hidden=True, logits_to_keep=1).hidden
    assert taught is not None
    half = target.dtype in (torch.bfloat16, torch.float16)
    with torch.set_grad_enabled(learn), torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
        said = draft.base_model(input_ids=ids, use_cache=False).last_hidden_state[rows]
    leaf = said.detach().requires_grad_(learn)
    out = Judged(count=int(rows.sum()))
    # logits over the vocabulary are large, so they are made, judged and differentiated some rows at a time
    for ours, theirs in zip(leaf.split(LOGIT_ROWS), taught[rows].split(LOGIT_ROWS), strict=True):
        with torch.no_grad():
            log_p = target.project(theirs).float().log_softmax(-1)
        with torch.set_grad_enabled(learn):
            log_q = target.project(ours.to(target.dtype)).float().log_softmax(-1)
            loss = cross_entropy(log_q, log_p).sum()
        if learn:
            (loss / out.count).backward()
        out.loss += float(loss.detach())
        out.agreed += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
    if learn:
        said.backward(leaf.grad)
    return out
