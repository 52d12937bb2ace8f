"""Generation that does not run to its end: the model answers as before, bit by bit, and nothing is left on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

import infer
from heads.grow import Budget
from infer.drafters import HeadsDrafter
from tests.infer.test_greedy import random_heads
from tests.infer.test_stream import TOKENIZERS
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30]])
SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "budget": Budget(rows=6, depth=3, width=2)}


class Stopped(Exception):
    """What a user's own code raises."""


class After:
    """Raises at its n-th call."""

    def __init__(self, calls: int, error: type[BaseException]) -> None:
        self.left, self.error = calls, error

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("enough")


def by_closing(model: Any, heads: Any, error: type[BaseException]) -> None:
    pieces = infer.stream(model, PROMPT, heads, tokenizer=TOKENIZERS["bytes"], **SETTINGS)
    next(pieces)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), "between pieces the caller's modes hold"
    pieces.close()  # type: ignore[attr-defined]
    raise error


def by_forgetting(model: Any, heads: Any, error: type[BaseException]) -> None:
    pieces = infer.stream(model, PROMPT, heads, tokenizer=TOKENIZERS["bytes"], **SETTINGS)
    next(pieces)
    del pieces
    raise error


def in_a_streamer(model: Any, heads: Any, error: type[BaseException]) -> None:
    class Streamer:
        put = After(4, error)

        def end(self) -> None:
            raise AssertionError("an interrupted stream does not end")

    infer.generate(model, PROMPT, heads, streamer=Streamer(), **SETTINGS)


def in_a_function_of_pieces(model: Any, heads: Any, error: type[BaseException]) -> None:
    infer.generate(model, PROMPT, heads, stream=After(3, error), tokenizer=TOKENIZERS["bytes"], **SETTINGS)


def in_a_processor(model: Any, heads: Any, error: type[BaseException]) -> None:
    raises = After(4, error)

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        raises()
        return scores

    infer.generate(model, PROMPT, heads, logits_processor=[processor], **SETTINGS)


def in_the_target(model: Any, heads: Any, error: type[BaseException]) -> None:
    """In the middle of a pass: some layers have appended to the cache, others have not."""
    hook = model.model.layers[2].register_forward_pre_hook(After(4, error))
    try:
        infer.generate(model, PROMPT, heads, **SETTINGS)
    finally:
        hook.remove()


def in_the_heads(model: Any, heads: Any, error: type[BaseException]) -> None:
    hook = heads.fc.register_forward_pre_hook(After(3, error))
    try:
        infer.generate(model, PROMPT, heads, **SETTINGS)
    finally:
        hook.remove()


def in_a_draft(model: Any, heads: Any, error: type[BaseException]) -> None:
    drafter, raises = HeadsDrafter(heads), After(3, error)
    real = drafter.propose

    def propose(*args: Any) -> Any:
        raises()
        return real(*args)

    drafter.propose = propose  # type: ignore[method-assign, assignment]
    infer.generate(model, PROMPT, drafter, **SETTINGS)


def through_transformers(model: Any, heads: Any, error: type[BaseException]) -> None:
    fast = infer.custom_generate(heads, stream=After(3, error), tokenizer=TOKENIZERS["bytes"])
    model.generate(PROMPT, custom_generate=fast, max_new_tokens=20, do_sample=False)


def in_a_batch_with_a_prefix_cache(model: Any, heads: Any, error: type[BaseException]) -> None:
    ids = torch.tensor([[7, 3, 44], [9, 30, 21]])
    raises = After(9, error)

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        raises()
        return scores

    prefix = infer.PrefixCache()
    infer.generate(model, ids, heads, logits_processor=[processor], prefix_cache=prefix, **SETTINGS)


WAYS: list[Callable[[Any, Any, type[BaseException]], None]] = [
    by_closing,
    by_forgetting,
    in_a_streamer,
    in_a_function_of_pieces,
    in_a_processor,
    in_the_target,
    in_the_heads,
    in_a_draft,
    through_transformers,
    in_a_batch_with_a_prefix_cache,
]


def hooks(*modules: torch.nn.Module) -> list[int]:
    """How many hooks there are, of all modules and on these."""
    everywhere = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    parts = [part for module in modules for part in module.modules()]
    return [len(table) for table in everywhere] + [len(p._forward_hooks) + len(p._forward_pre_hooks) for p in parts]


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_model_is_usable_and_unchanged(
    way: Callable[[Any, Any, type[BaseException]], None], error: type[BaseException]
) -> None:
    model = tiny_model("llama", vocab=300)
    heads = random_heads(model, "eagle")
    plain = model.generate(PROMPT, max_new_tokens=20, do_sample=False)
    model(PROMPT, output_hidden_states=[1, 2, 3])  # transformers hooks its layers for this, and leaves the hooks there
    model.train()
    heads.train()
    model.model.layers[0].eval()
    logits = model(PROMPT).logits
    modes = [part.training for module in (model, heads) for part in module.modules()]
    before, weights = hooks(model, heads), {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(error):
        way(model, heads, error)

    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert [part.training for module in (model, heads) for part in module.modules()] == modes
    assert hooks(model, heads) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(PROMPT).logits, logits), "bit by bit"
    assert torch.equal(infer.generate(model, PROMPT, heads, **SETTINGS).sequences, plain)
    model(PROMPT).logits.sum().backward()
