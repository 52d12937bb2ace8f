"""The cache after random trees and random accepted paths equals that of a plain prefill of what was kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, JambaConfig, MambaConfig

import infer
from heads.draft import Draft
from heads.target import Target
from infer.cache import ForgettingCache
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
TARGETS = {
    "llama": Target(tiny_model("llama", layers=2)),
    "gpt2": Target(tiny_model("gpt2", layers=2)),
    "mistral": Target(tiny_model("mistral", layers=2, sliding_window=8)),
    "gemma3": Target(tiny_model("gemma3", layers=6)),  # five sliding layers to one full
}
BOUND = 1e-10


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Draft, int]:
    """A tree and one of its nodes (-1: nothing accepted)."""
    parents: list[int] = []
    for node in range(draw(st.integers(1, 10))):
        parents.append(draw(st.integers(-1, node - 1)))
    tokens = draw(st.lists(st.integers(0, 63), min_size=len(parents), max_size=len(parents)))
    tree = Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))
    return tree, draw(st.integers(-1, len(parents) - 1))


def run_pass(target: Target, cache: ForgettingCache, draft: Draft, shift: int = 0, blind: bool = False) -> Tensor:
    """One verification pass behind the prompt; ``shift`` and ``blind`` plant a wrong position, a wrong mask."""
    base = cache.length
    depths = torch.tensor([[0, *(depth + shift for depth in draft.depths)]])
    seen = draft.visibility()
    if blind:
        seen = torch.ones_like(seen).tril()
    mask = torch.cat([torch.ones(len(draft) + 1, base, dtype=torch.bool), seen], 1)[None, None]
    rows = torch.tensor([[1, *draft.tokens]])
    return target.forward(rows, cache=cache, mask=mask, positions=base + depths).logits[0]


def prefilled(target: Target, ids: Tensor) -> tuple[ForgettingCache, Tensor]:
    cache = ForgettingCache(target, capacity=4)
    return cache, target.forward(ids, cache=cache, positions=torch.arange(ids.shape[1])[None]).logits[0]


def difference(a: ForgettingCache, b: ForgettingCache) -> float:
    """Largest relative difference of any layer's keys or values."""
    assert a.length == b.length
    worst = 0.0
    for x, y in zip(a.forgetting, b.forgetting, strict=True):
        assert x.store is not None and y.store is not None
        for ours, theirs in zip(x.store.view(), y.store.view(), strict=True):
            worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
    return worst


def after(draft: Draft, node: int) -> Tensor:
    """Prompt, root and the path to a node, as plain text."""
    return torch.cat([PROMPT, torch.tensor([[1, *(draft.tokens[i] for i in draft.path(node))]])], 1)


@pytest.mark.parametrize("family", TARGETS)
@given(case=drafts())
@settings(max_examples=20, deadline=None)
@torch.inference_mode()
def test_state_after_keep_is_that_of_a_plain_prefill(family: str, case: tuple[Draft, int]) -> None:
    target, (draft, node) = TARGETS[family], case
    cache, _ = prefilled(target, PROMPT)
    base = cache.length
    logits = run_pass(target, cache, draft)
    path = draft.path(node)
    plain, expected = prefilled(target, after(draft, node))
    scale = float(expected.abs().max())
    assert float((logits[[0, *(1 + i for i in path)]] - expected[base:]).abs().max()) <= BOUND * scale
    cache.keep(base, [[0, *(1 + i for i in path)]])
    assert difference(cache, plain) <= BOUND

    # and the next pass goes on from there
    root = torch.tensor([[2]])
    place = torch.tensor([[cache.length]])
    ours = target.forward(root, cache=cache, positions=place).logits
    theirs = target.forward(root, cache=plain, positions=place).logits
    assert float((ours - theirs).abs().max()) <= BOUND * scale


TREE = Draft((5, 9, 11, 30, 2), (-1, -1, 1, 2, 0), (None,) * 5)


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("bug", ["position", "mask", "order", "leftover"])
@torch.inference_mode()
def test_planted_bugs_exceed_the_bound_a_thousandfold(family: str, bug: str) -> None:
    target, path = TARGETS[family], TREE.path(3)
    cache, _ = prefilled(target, PROMPT)
    base = cache.length
    run_pass(target, cache, TREE, shift=int(bug == "position"), blind=bug == "mask")
    kept = {"order": [0, *(1 + i for i in reversed(path))], "leftover": list(range(len(path) + 1))}
    cache.keep(base, [kept.get(bug, [0, *(1 + i for i in path)])])
    plain, _ = prefilled(target, after(TREE, 3))
    root, place = torch.tensor([[2]]), torch.tensor([[cache.length]])
    ours, theirs = (target.forward(root, cache=c, positions=place).logits for c in (cache, plain))
    assert max(difference(cache, plain), float((ours - theirs).abs().max())) > 1000 * BOUND


REFUSED: dict[str, Any] = {
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
    "linear_attention|mamba|hybrid": JambaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_states_that_cannot_be_rolled_back_are_refused_by_name(named: str) -> None:
    """The message says which layer type it is."""
    model = AutoModelForCausalLM.from_config(REFUSED[named])
    with pytest.raises(ValueError, match=f"of type '({named}|linear_attention)'.*cannot be rolled back"):
        infer.generate(model, PROMPT, max_new_tokens=3)
