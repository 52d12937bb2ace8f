"""A pass through some of the target's own layers, between its embedding and its final norm; nothing is loaded twice.

The decoder that holds the layers is run by its own code, so rotary embeddings, masks by layer type and whatever
else a family hands to its layers are the family's business. What runs is a copy of the outermost module only: its
parameters and buffers are the target's, its list of layers and its configuration name the chosen ones::

      ids ─► embedding ─► layer 0 … 8 ─► [ layers 9 … 19 left out ] ─► layer 20 … 29 ─► final norm ─► hidden

States that enter the first layer can be given instead of ids. Layers keep their numbers, by which a cache knows them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads import compat, masks

if TYPE_CHECKING:
    from heads.target import Target


class Partial:
    """Some layers of a target, as a model of its kind that shares every weight with it.

    Args:
        target: whose layers.
        layers: their numbers, from 0, increasing.

    Raises:
        ValueError: no layers, numbers that do not exist or do not increase, or a model whose decoder does not work
            with fewer layers; it is named.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must be at least one number, each larger than the one before: {list(layers)}")
        if self.layers[0] < 0 or self.layers[-1] >= target.num_layers:
            raise ValueError(f"{target.name} has layers 0 to {target.num_layers - 1}; {list(layers)} names others")
        self._states: Tensor | None = None
        decoder, name = self._holder()
        kind: Any = type(decoder)
        self._cache_argument = compat.cache_argument(kind)
        self._chosen = nn.ModuleList(
            self._admitting(target.layers[at]) if at == layers[0] else target.layers[at] for at in self.layers
        )
        self._decoder = self._shortened(decoder, name)
        self._try()

    def _holder(self) -> tuple[PreTrainedModel, str]:
        """The module that holds the layers, and under which name."""
        kind = type(self.target.model).__name__
        module: Any
        for module in self.target.model.modules():
            for name, child in module.named_children():
                if child is not self.target.layers:
                    continue
                holder: Any = type(module)
                if self.target.by_place:
                    raise ValueError(
                        f"the {self.target.by_place} of {kind} go by places in the cache, where drafts of its own "
                        "layers stand too: drafting with them is not supported"
                    )
                if not isinstance(module, PreTrainedModel) or not compat.takes(holder, "position_ids"):
                    raise ValueError(
                        f"{kind} holds its layers in {holder.__name__}, which cannot be run by itself with "
                        "positions of the caller's: drafting with its own layers is not supported"
                    )
                if "forward" in vars(module) or any("forward" in vars(layer) for layer in self.target.layers):
                    raise ValueError(
                        f"{kind} is spread over devices or offloaded: drafting with its own layers is not supported"
                    )
                return module, name
        raise ValueError(f"{kind} does not hold its layers as a submodule: they cannot be run in part")

    def _shortened(self, decoder: PreTrainedModel, name: str) -> PreTrainedModel:
        """A copy of ``decoder`` that knows the chosen layers only; modules inside are the very same ones."""
        config = copy.copy(decoder.config)
        config.num_hidden_layers = len(self.layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [self.target.layer_types[at] for at in self.layers]
        short = copy.copy(decoder)
        short._modules = {**decoder._modules, name: self._chosen}
        short.config = config
        short.training = False
        return short

    def _admitting(self, layer: nn.Module) -> nn.Module:
        """The layer with a hook that puts given states in place of the embedding's; the target's own stays without."""
        entry = copy.copy(layer)
        entry._forward_pre_hooks = layer._forward_pre_hooks.copy()
        entry.register_forward_pre_hook(self._enter)
        return entry

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self._states is None else (self._states, *args[1:])

    def _try(self) -> None:
        """Two tokens, to see that the chosen layers run, each once and in order."""
        ran: list[int] = []
        hooks = [
            module.register_forward_hook(lambda *_, at=at: ran.append(at))
            for at, module in zip(self.layers, self._chosen, strict=True)
        ]
        kind = type(self.target.model).__name__
        try:
            hidden = self(torch.zeros(1, 2, dtype=torch.long, device=self.target.device))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"{kind} does not run with some of its layers only ({error})") from error
        finally:
            for hook in hooks:
                hook.remove()
        if tuple(ran) != self.layers or hidden.shape[:2] != (1, 2):
            raise ValueError(f"{kind} does not run with some of its layers only: of {list(self.layers)} ran {ran}")

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor | None = None,
        *,
        states: Tensor | None = None,
        cache: Any = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Post-norm hidden states (B, q, H) behind the last of the layers; ``target.project`` makes logits of them.

        Args:
            ids: (B, q) tokens to embed, or
            states: (B, q, H) what enters the first of the layers: the target's tap of that layer's number.
            cache: a transformers cache with a place for every layer of the target, or None.
            mask: (B, 1, q, kv) bool, True where a row may look; None is causal.
            positions: (B, q); counted on from the cache by default.
        """
        if (ids is None) == (states is None):
            raise ValueError("give either ids or states")
        if ids is None:
            assert states is not None
            ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        kwargs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": cache is not None}
        if cache is not None:
            kwargs[self._cache_argument] = cache
        if mask is not None:
            kwargs["attention_mask"] = masks.attention_mask(self.target, mask, positions, None)
        self._states = states
        try:
            return self._decoder(**kwargs).last_hidden_state
        finally:
            self._states = None
