"""Part of the target's layers: the same computation as inside the whole model, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BloomConfig, DynamicCache

from heads.target import Target
from tests.tiny import FAMILIES, tiny_model

LAYERS = 4


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(3))


def target_of(family: str, **overrides: Any) -> Target:
    return Target(tiny_model(family, layers=LAYERS, **overrides))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_are_the_model(family: str, attention: str, ids: Tensor) -> None:
    target = target_of(family, attn_implementation=attention)
    ours = target.project(target.partial(range(LAYERS))(ids))
    torch.testing.assert_close(ours, target.forward(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", range(1, LAYERS))
def test_states_enter_a_layer_where_its_tap_was_taken(family: str, first: int, ids: Tensor) -> None:
    target = target_of(family)
    out = target.forward(ids, taps=(first,), hidden=True)
    assert out.taps is not None and out.hidden is not None
    upper = target.partial(range(first, LAYERS))(states=out.taps)
    torch.testing.assert_close(upper, out.hidden, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_left_out_is_a_layer_that_adds_nothing(family: str, ids: Tensor) -> None:
    """The middle of the model is skipped as if its layers passed their input on."""
    target = target_of(family)
    partial = target.partial([0, 3])(ids)
    hooks = [layer.register_forward_hook(pass_on) for layer in target.layers[1:3]]
    whole = target.forward(ids, hidden=True).hidden
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(partial, whole, rtol=0, atol=0)
    assert not torch.allclose(partial, target.forward(ids, hidden=True).hidden)  # type: ignore[arg-type]


def pass_on(module: nn.Module, args: tuple[Tensor, ...], output: object) -> object:
    return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "opt"])
def test_positions_masks_and_the_cache_keep_their_meaning(family: str, ids: Tensor) -> None:
    """A block behind a cached beginning, with a mask and positions of the caller's, is the uncached pass's end."""
    target = target_of(family)
    partial, n, q = target.partial([0, 1, 3]), 18, 6
    whole = partial(ids)
    cache = DynamicCache()  # without a window: the mask has it
    partial(ids[:, :n], cache=cache)
    mask = torch.cat([torch.ones(q, n), torch.ones(q, q).tril()], 1).bool()[None, None].expand(2, 1, q, n + q)
    positions = torch.arange(n, n + q).expand(2, q)
    block = partial(ids[:, n:], cache=cache, mask=mask, positions=positions)
    torch.testing.assert_close(block, whole[:, n:])
    layers: list[Any] = cache.layers
    assert [len(layer.keys) if layer.is_initialized else 0 for layer in layers] == [2, 2, 0, 2]


def test_nothing_is_loaded_twice_and_the_target_stays_as_it_was(ids: Tensor) -> None:
    target = target_of("llama")
    before = target.forward(ids, taps=(2,))
    partial = target.partial([0, 2])
    inside = {p.data_ptr() for p in partial._decoder.parameters()}
    assert inside < {p.data_ptr() for p in target.model.parameters()}
    partial(states=torch.randn(2, 5, target.hidden_size, dtype=torch.float64))
    after = target.forward(ids, taps=(2,))
    assert torch.equal(before.logits, after.logits) and torch.equal(before.taps, after.taps)  # type: ignore[arg-type]
    assert len(target.layers) == target.config.num_hidden_layers == LAYERS
    assert not target.layers[0]._forward_pre_hooks


@pytest.mark.parametrize(
    "layers, said", [([], "at least one"), ([1, 1], "larger than"), ([2, 1], "larger than"), ([3, 4], "0 to 3")]
)
def test_wrong_layers_are_refused(layers: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        target_of("llama").partial(layers)


def test_positions_by_place_are_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match="of BloomForCausalLM go by places in the cache"):
        Target(model).partial([0])


def test_an_offloaded_model_is_refused() -> None:
    target = target_of("llama")
    target.layers[0].forward = target.layers[0].forward  # what hooks of a device map leave behind
    with pytest.raises(ValueError, match="LlamaForCausalLM is spread"):
        target.partial([0])


def test_either_ids_or_states(ids: Tensor) -> None:
    partial = target_of("llama").partial([0])
    with pytest.raises(ValueError, match="either"):
        partial()
    with pytest.raises(ValueError, match="either"):
        partial(ids, states=torch.zeros(2, 24, 32))
