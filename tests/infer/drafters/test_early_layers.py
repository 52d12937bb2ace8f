"""The target's own layers as its drafter: exact text, the target's cache as it was, states as an uncached pass has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.cache import ForgettingCache
from infer.drafters import early_layers
from infer.drafters.early_layers import EarlyLayersDrafter, format_layers, parse_layers
from infer.static import StaticCache
from tests.infer.drafters.common import BUDGETS, NEW, PROMPT, Checked, decode, plain, target_of
from tests.tiny import FAMILIES, tiny_model

SUBSETS = {"first": [0, 1], "gap": [0, 3], "without the first": [1, 2, 3], "two gaps": [0, 2]}


def checked(target: Target, layers: Sequence[int]) -> Checked:
    """A drafter whose every node is compared with an uncached pass through the layers."""
    drafter = EarlyLayersDrafter(target, layers)
    return Checked(drafter, lambda ids: target.project(drafter._whole(ids))[0, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets(family: str) -> None:
    target = target_of(family)
    for layers, budget in zip(SUBSETS.values(), [*BUDGETS.values(), BUDGETS["chain"]], strict=True):
        out = decode(target, EarlyLayersDrafter(target, layers), budget)
        assert out.sequences[0].tolist() == plain(target)
        assert out.stats.proposed > 0


CHECKED = [("llama", name, budget) for name in SUBSETS for budget in BUDGETS]


@pytest.mark.parametrize(
    "family, layers, budget",
    [*CHECKED, ("gpt2", "gap", "dynamic tree"), ("gemma2", "gap", "dynamic tree"), ("gemma2", "two gaps", "chain")],
)
def test_each_node_is_drafted_from_its_own_prefix(family: str, layers: str, budget: str) -> None:
    target = target_of(family)
    drafter = checked(target, SUBSETS[layers])
    assert decode(target, drafter, BUDGETS[budget]).sequences[0].tolist() == plain(target)
    assert len(drafter.drafts) > 3


@pytest.mark.parametrize("layers", [[0, 1], [0, 3], [2, 3]])
def test_layers_that_matter_draft_what_the_target_says(layers: list[int]) -> None:
    """With layers that add nothing left out, each draft is right: nothing is missing from either cache."""
    model = tiny_model("llama")
    for at in {0, 1, 2, 3} - set(layers):
        for matrix in (model.model.layers[at].self_attn.o_proj, model.model.layers[at].mlp.down_proj):
            torch.nn.init.zeros_(matrix.weight)
    target = Target(model)
    drafter = EarlyLayersDrafter(target, layers)
    stats = decode(target, drafter, Budget.chain(4), 1 + 4 * 5).stats
    assert [(r.accepted, r.emitted) for r in stats.log] == [(4, 5)] * 4
    assert drafter.module_seconds > 0


def test_only_the_gap_is_tapped() -> None:
    target = target_of("llama")
    taps = {name: EarlyLayersDrafter(target, layers).taps for name, layers in SUBSETS.items()}
    assert taps == {"first": (), "gap": (1,), "without the first": (0,), "two gaps": (1,)}


class Guarded(EarlyLayersDrafter):
    """Looks at the target's cache before and after each draft."""

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        before = self._contents()
        draft = super().propose(budget, sampler)
        for was, now in zip(before, self._contents(), strict=True):
            assert torch.equal(was, now)
        return draft

    def _contents(self) -> list[Tensor]:
        assert self._row is not None
        layers = (self._row.layer(at).view() for at in range(self.target.num_layers))
        return [tensor.clone() for pair in layers for tensor in pair]


@pytest.mark.parametrize("layers", SUBSETS.values(), ids=SUBSETS)
def test_the_targets_cache_is_as_before(layers: list[int]) -> None:
    target = target_of("llama")
    for budget in BUDGETS.values():
        assert decode(target, Guarded(target, layers), budget).sequences[0].tolist() == plain(target)


def test_a_draft_that_fails_leaves_nothing_behind() -> None:
    target = target_of("llama")
    drafter, cache = EarlyLayersDrafter(target, [0, 3]), ForgettingCache(target)
    out = target.forward(PROMPT, cache=cache, taps=drafter.taps)
    drafter.share(cache.row(0))
    drafter.begin(target, torch.cat([PROMPT, PROMPT[:, :1]], 1), out.taps)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of memory")

    drafter.target = Target(target.model)
    drafter.target.project = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        drafter.propose(Budget.chain(2), None)
    assert cache.lengths == [PROMPT.shape[1]] and cache.row(0).length == PROMPT.shape[1]


def test_sampled_drafts_carry_what_they_were_drawn_from() -> None:
    target = target_of("llama")
    drafter = checked(target, [0, 1, 3])
    decode(target, drafter, Budget.chain(3), do_sample=True, temperature=0.8, top_k=0, seed=4)
    assert all(q is not None for draft in drafter.drafts for q in draft.q) and len(drafter.drafts) > 3


def test_texts_of_a_batch_each_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts that end at different times; committed rows run in several parts."""
    monkeypatch.setattr(early_layers, "CHUNK", 4)
    target = target_of("llama")
    prompts = [PROMPT, PROMPT[:, :3], PROMPT[:, 2:]]
    width = PROMPT.shape[1]
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    alone = [target.model.generate(p, max_new_tokens=NEW, do_sample=False)[0, p.shape[1] :].tolist() for p in prompts]
    out = infer.generate(
        target,
        ids,
        draft=EarlyLayersDrafter(target, [0, 3]),
        budget=BUDGETS["dynamic tree"],
        attention_mask=mask,
        max_new_tokens=NEW,
    )
    assert out.sequences[:, width:].tolist() == alone


def test_it_goes_as_far_as_the_target_has_positions() -> None:
    target = target_of("gpt2", n_positions=20)
    out = decode(target, EarlyLayersDrafter(target, [0, 2]), BUDGETS["dynamic tree"], 11)
    assert out.sequences[0].tolist() == plain(target, 11)


@pytest.mark.parametrize("budget", [BUDGETS["chain"], BUDGETS["static tree"], Budget(rows=40, depth=4, width=3)])
def test_it_goes_as_far_as_a_static_cache_has_room(budget: Budget) -> None:
    """Wide trees append more than the target's pass has rows; at the end of the cache they are less deep."""
    target = target_of("llama")
    drafter = EarlyLayersDrafter(target, [0, 3])
    cache = StaticCache(target, capacity=PROMPT.shape[1] + 12)
    out = target.forward(PROMPT, cache=cache, taps=drafter.taps)
    drafter.share(cache.row(0))
    drafter.begin(target, torch.cat([PROMPT, PROMPT[:, :1]], 1), out.taps)
    depths = []
    for length in range(PROMPT.shape[1], cache.capacity + 1):
        depths.append(max(drafter.propose(budget, None).depths, default=0))
        if length < cache.capacity:
            cache.keep([length], [[0]])  # as if the target had read one more token
            drafter.commit(torch.zeros(1, 1, target.hidden_size, dtype=target.dtype), [1])
    assert depths[0] == budget.depth and depths[-2:] == [1, 0] and depths == sorted(depths, reverse=True)


def test_static_caches_and_passes_of_fixed_shape() -> None:
    target = target_of("llama")
    for settings in ({"cache_implementation": "static"}, {"stable": True}):
        out = decode(target, EarlyLayersDrafter(target, [0, 3]), Budget.chain(3), **settings)
        assert out.sequences[0].tolist() == plain(target) and out.stats.proposed > 0


@pytest.mark.parametrize(
    "text, layers", [("0", [0]), ("0-2", [0, 1, 2]), ("0-1,3", [0, 1, 3]), (" 0 - 1 , 3-4", [0, 1, 3, 4])]
)
def test_layers_are_written_with_both_ends(text: str, layers: list[int]) -> None:
    assert parse_layers(text) == layers
    assert parse_layers(format_layers(layers)) == layers


def test_layers_are_shown_as_short_as_they_can_be() -> None:
    assert format_layers([0, 1, 2, 8, 20, 21]) == "0-2,8,20-21"


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-2,2-3", "2,1", "0-", "-1", "0--2", "0;2"])
def test_other_ways_of_writing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layers"):
        EarlyLayersDrafter.from_spec(text, None, target_of("llama"))


def test_what_is_refused() -> None:
    target = target_of("llama")
    with pytest.raises(ValueError, match="all 4 layers"):
        EarlyLayersDrafter.from_spec("0-3", None, target)
    with pytest.raises(ValueError, match="layers 0 to 3"):
        EarlyLayersDrafter.from_spec("0,7", None, target)
    drafter = EarlyLayersDrafter.from_spec("0-1", None, target)
    with pytest.raises(ValueError, match="make the drafter for it"):
        drafter.begin(target_of("gpt2"), PROMPT, None)
    with pytest.raises(ValueError, match="share"):
        drafter.begin(target, PROMPT, None)
