"""Compiled passes: the target's forward through ``torch.compile``, with a static cache and drafts of a fixed size.

Every pass after the prefill then has one shape and one set of addresses, so that the model is compiled once; on CUDA
with CUDA graphs (``mode="reduce-overhead"``), since most of a small pass's time goes into launching kernels. What was
compiled, and the cache it was compiled for, is kept with the model and used by later calls: they compile nothing.

Not every model fits: where a forward depends on its data, as loops over experts do, it falls apart into many graphs,
and when these do not come to an end the call fails instead of going on uncompiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from heads.target import Target
from infer.static import StaticCache

BLOCK = 256  # capacities are multiples of it, so that calls share a cache

# each model's compilations count by themselves; older versions of torch count all that share a function together
_ISOLATED: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)

_known: WeakKeyDictionary[nn.Module, dict[Any, Compiled]] = WeakKeyDictionary()


class Compiled:
    """One model's passes of one shape.

    Args:
        options: of ``torch.compile``: backend, mode, fullgraph, options.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        # the model is an argument: held by what is kept for it, it would never be freed
        self.forward: Callable[..., Any] = torch.compile(_forward, dynamic=False, **_ISOLATED, **options)
        self._free: list[StaticCache] = []

    @classmethod
    def of(cls, target: Target, shape: Any, options: dict[str, Any]) -> Compiled:
        """What earlier calls compiled for this model, or the first of them is going to.

        Args:
            shape: all that makes passes differ.
            options: as above; none are ``mode="reduce-overhead"`` on CUDA and torch's own choice elsewhere.
        """
        if not options and target.device.type == "cuda":
            options = {"mode": "reduce-overhead"}
        known = _known.setdefault(target.model, {})
        key = (shape, *sorted((name, value if callable(value) else repr(value)) for name, value in options.items()))
        if key not in known:
            known[key] = cls(options)
        return known[key]

    @contextmanager
    def cache(self, target: Target, capacity: int) -> Iterator[StaticCache]:
        """An empty cache for one text of up to ``capacity`` positions, lent to one call at a time."""
        fits = [cache for cache in self._free if cache.capacity >= capacity]
        if fits:
            cache = min(fits, key=lambda cache: cache.capacity)
            self._free.remove(cache)
        else:
            cache = StaticCache(target, capacity=-(-capacity // BLOCK) * BLOCK)
        try:
            yield cache
        finally:
            cache.clear()
            self._free.append(cache)

    @contextmanager
    def passes(self, target: Target) -> Iterator[None]:
        """Passes of ``target`` inside are compiled ones."""
        before = target.call
        target.call = partial(self._call, target.model)
        try:
            yield
        finally:
            target.call = before

    def _call(self, model: nn.Module, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # rather than go on uncompiled unseen
            if not kwargs["input_ids"].is_cuda:
                return self.forward(model, kwargs)
            torch.compiler.cudagraph_mark_step_begin()
            return _copied(self.forward(model, kwargs))


def _forward(model: nn.Module, kwargs: dict[str, Any]) -> Any:
    return model(**kwargs)


def _copied(out: Any) -> Any:
    """A model's output in memory of its own: the next replay of a CUDA graph writes over what this one returned."""
    for name, value in list(out.items()):
        if isinstance(value, Tensor):
            out[name] = value.clone()
        elif isinstance(value, tuple | list):
            out[name] = tuple(each.clone() if isinstance(each, Tensor) else each for each in value)
    return out
