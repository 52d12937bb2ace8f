"""The gate: an adapter and embeddings of its own for some rows of a pass, and nothing at all for the others.

Hooks stand on the target's embedding and linear layers for as long as a pass takes. Rows before the gate are taken over
as they came out, not added zero to: they are the same bits with any adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from heads.lora import LoraPair, linear_layers
from heads.target import Target


@contextmanager
def gated(
    target: Target, pairs: Mapping[str, LoraPair], embeddings: Tensor, first: int, slots: Tensor
) -> Iterator[None]:
    """Passes of ``target`` inside have rows from ``first`` on that read ``embeddings`` and are adapted.

    Only passes of this thread; the target itself runs without autocast, its adapters as they would around this block.

    Args:
        pairs: by name of the linear layer.
        embeddings: (K, H), in place of the token's.
        slots: (B, m) which of them each of those rows reads.

    Raises:
        ValueError: from a pass, that it has other rows, or that a layer does not read them in order.
    """
    gate = _Gate(embeddings, first, slots)
    layers = linear_layers(target)
    missing = [name for name in pairs if name not in layers]
    if missing:
        raise ValueError(f"{target.name} has no {missing[0]}, which these heads adapt: it is built otherwise")
    hooks = [target.embedding.register_forward_hook(gate.embed)]
    hooks += [layers[name].register_forward_hook(partial(gate.adapt, name, pair)) for name, pair in pairs.items()]
    try:
        with torch.autocast(target.device.type, enabled=False):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Gate:
    def __init__(self, embeddings: Tensor, first: int, slots: Tensor) -> None:
        self.embeddings, self.first, self.slots, self.thread = embeddings, first, slots, get_ident()
        kind = embeddings.device.type
        self.autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def embed(self, module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        if get_ident() != self.thread:
            return None
        if output.shape[:2] != (self.slots.shape[0], self.first + self.slots.shape[1]):
            raise ValueError(
                f"a pass of {tuple(output.shape[:2])} rows has no {tuple(self.slots.shape)} rows of heads from "
                f"{self.first} on"
            )
        return torch.cat([output[:, : self.first], self.embeddings[self.slots].to(output)], 1)

    def adapt(
        self, name: str, pair: LoraPair, module: Any, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        if get_ident() != self.thread:
            return None
        texts, rows = self.slots.shape[0], self.first + self.slots.shape[1]
        x = inputs[0]
        if x.shape[:-1].numel() != texts * rows:
            raise ValueError(
                f"{name} reads {tuple(x.shape[:-1])} rows of a pass of {texts} × {rows}: which are which cannot be "
                "told; leave it out of lora_modules"
            )
        x, out = x.reshape(texts, rows, -1), output.reshape(texts, rows, -1)
        with self.autocast():
            more = pair(x[:, self.first :])
        return torch.cat([out[:, : self.first], out[:, self.first :] + more.to(out)], 1).view(output.shape)
