"""Hybrids: each part sees the whole text and its own taps, whoever drafts; the text stays the target's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.cost_store import place
from infer.drafters import Drafter, FirstToSpeak, HeadsDrafter, LookupDrafter, Merged, NoDrafter, make
from infer.drafters.hybrid import TapSlices
from tests.heads.small import small_heads
from tests.infer.drafters.common import BUDGETS, NEW, PROMPT, decode, plain, target_of
from tests.infer.fakes import FakeDrafter, Oracle

Kind = type[FirstToSpeak] | type[Merged]


def target() -> Target:
    return target_of("llama")


@cache
def heads(kind: str) -> Any:
    return small_heads(kind, target(), taps=(4,) if kind == "medusa" else (1, 2, 3))


@pytest.mark.parametrize(
    "wanted", [[(1, 2), (2, 3)], [(), (4,)], [(3, 1), (1, 3)], [(2,), (2,)], [(1, 2, 3), (3, 1)], [(), ()]]
)
def test_each_gets_its_own_taps_of_the_union(wanted: list[tuple[int, ...]]) -> None:
    states = {tap: torch.randn(1, 5, 8) for tap in range(5)}

    def of(taps: tuple[int, ...]) -> Tensor | None:
        return torch.cat([states[tap] for tap in taps], -1) if taps else None

    slices = TapSlices(wanted)
    assert len(set(slices.taps)) == len(slices.taps) and set(slices.taps) == {tap for taps in wanted for tap in taps}
    for part, taps in enumerate(wanted):
        theirs, ours = of(taps), slices.of(part, of(slices.taps))
        assert ours is theirs is None or (ours is not None and theirs is not None and torch.equal(ours, theirs))


class Following(Oracle):
    """An oracle that collects its taps, and knows the text only in every other round."""

    def __init__(self, text: list[int], taps: tuple[int, ...], silent: int) -> None:
        super().__init__(text, taps)
        self.silent = silent
        self.seen: list[Tensor] = []

    def _check(self, taps: Tensor | None, rows: int) -> None:
        super()._check(taps, rows)
        assert taps is not None
        self.seen.append(taps)

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        return Draft.empty() if self.rounds % 2 == self.silent else super().draft(budget, sampler)


@pytest.mark.parametrize("kind", [FirstToSpeak, Merged])
def test_all_parts_follow_the_text_with_their_own_taps(kind: Kind) -> None:
    text = plain(target())
    parts = Following(text, (1, 2), 0), Following(text, (3, 2), 1)
    out = decode(target(), kind(parts, ["a", "b"]), Budget.chain(3))
    assert out.sequences[0].tolist() == text
    for part in parts:
        known = torch.cat(part.seen, 1)
        assert part.text == text[: known.shape[1] + 1]
        theirs = target().forward(torch.tensor([part.text[:-1]]), taps=part.taps).taps
        torch.testing.assert_close(known, theirs)


class Fresh:
    """Compares each draft of heads with that of new ones which read the whole text at once."""

    def __init__(self, inner: HeadsDrafter) -> None:
        self.inner = inner
        self.text: list[int] = []
        self.rounds = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        self.text = ids[0].tolist()
        self.inner.begin(target, ids, taps)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        self.text += ids
        self.inner.commit(taps, ids)

    def fork(self) -> Fresh:
        return Fresh(self.inner.fork())

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        self.rounds += 1
        ids, other = torch.tensor([self.text]), self.inner.fork()
        other.begin(target(), ids, target().forward(ids[:, :-1], taps=self.inner.taps).taps)
        draft = self.inner.propose(budget, sampler)
        again = other.propose(budget, sampler)
        assert (draft.tokens, draft.parents) == (again.tokens, again.parents)
        assert draft.scores == pytest.approx(again.scores, abs=1e-5)
        return draft


@pytest.mark.parametrize("kind", [FirstToSpeak, Merged])
@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_heads_know_what_others_drafted(name: str, kind: Kind) -> None:
    """Rounds that lookup drafts, or drafts with them, leave the heads' state right."""
    prompt = PROMPT.repeat(1, 2)
    fresh = Fresh(HeadsDrafter(heads(name)))
    infer.generate(target(), prompt, kind([Every(2), fresh]), max_new_tokens=24)
    assert fresh.rounds > 3


class Every(FakeDrafter):
    """Says some tokens in every ``n``-th round."""

    def __init__(self, n: int) -> None:
        super().__init__(())
        self.n = n

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        return Draft.chain([1, 2][: budget.depth]) if self.rounds % self.n == 0 else Draft.empty()


def test_the_first_that_has_something_to_say_drafts() -> None:
    drafter = FirstToSpeak([LookupDrafter(3), NoDrafter(), Oracle(list(range(50)), ())], ["lookup", "none", "oracle"])
    drafter.begin(target(), torch.tensor([[9, 8, 7, 6, 9, 8]]), None)
    draft = drafter.propose(Budget.chain(3), None)  # two tokens match, three are asked for
    assert (draft.tokens, draft.sources) == ((6, 7, 8), ("oracle",) * 3)
    drafter.commit(None, [7])
    draft = drafter.propose(Budget.chain(3), None)
    assert (draft.tokens, draft.sources) == ((6, 9, 8), ("lookup",) * 3)
    assert drafter.lookahead == LookupDrafter().lookahead
    quiet = FirstToSpeak([NoDrafter(), LookupDrafter()])
    quiet.begin(target(), torch.tensor([[1, 2]]), None)
    assert len(quiet.propose(Budget.chain(3), None)) == 0


def test_no_part_drafts_deeper_than_its_look_ahead() -> None:
    drafter = FirstToSpeak([LookupDrafter(5), HeadsDrafter(heads("medusa"))])  # three heads: a fourth draft would raise
    ids = torch.tensor([PROMPT[0].tolist()])
    drafter.begin(target(), ids, target().forward(ids[:, :-1], taps=drafter.taps).taps)
    assert len(drafter.propose(Budget.chain(10), None)) == 3


def test_merged_sources_name_each_node() -> None:
    drafter = Merged([LookupDrafter(2), Oracle(list(range(50)), ())], ["lookup", "oracle"])
    drafter.begin(target(), torch.tensor([[9, 8, 6, 9, 8]]), None)
    draft = drafter.propose(Budget(rows=9, depth=4), None)
    assert set(draft.sources) == {"lookup", "oracle"} and len(draft.sources) == len(draft) == 8
    nested = FirstToSpeak([drafter, NoDrafter()])
    assert nested.propose(Budget(rows=9, depth=4), None).sources == draft.sources


# whole texts


def parts(spec: str) -> list[Drafter]:
    made: dict[str, Drafter] = {kind: HeadsDrafter(heads(kind)) for kind in ("medusa", "eagle")}
    return [made[name] if name in made else make(name, None, target()) for name in spec.split()]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", [FirstToSpeak, Merged])
@pytest.mark.parametrize("spec", ["lookup:1 medusa", "eagle lookup:1", "medusa eagle", "lookup:1 layers:0-1,3 eagle"])
def test_the_text_is_the_target_s(spec: str, kind: Kind, budget: str) -> None:
    out = decode(target(), kind(parts(spec)), BUDGETS[budget])
    assert out.sequences[0].tolist() == plain(target())
    assert out.stats.proposed > 0


@pytest.mark.parametrize("draft", ["lookup:1 + layers:0-1", "layers:0-1 | lookup:1", "lookup+lookup:1|layers:0,2-3"])
def test_hybrids_by_name_in_a_batch(draft: str) -> None:
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    out = infer.generate(target(), prompts, draft, max_new_tokens=NEW)
    for row, prompt in enumerate(prompts):
        theirs = target().model.generate(prompt[None], do_sample=False, max_new_tokens=NEW)
        assert out.sequences[row].tolist() == theirs[0].tolist()


@pytest.mark.parametrize("draft", ["lookup:1+layers:0-1", "layers:0-1|lookup:1", "lookup:1|layers:0-2|layers:0,3"])
def test_a_seed_fixes_a_sampled_text(draft: str) -> None:
    texts = [
        infer.generate(
            target(), PROMPT, draft, do_sample=True, temperature=0.8, seed=seed, max_new_tokens=NEW
        ).sequences
        for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


# what parts have


class Sharing(FakeDrafter):
    """Drafts in the target's cache."""

    shares_cache = True
    module_seconds = 0.25

    def __init__(self) -> None:
        super().__init__(())
        self.modules = (nn.Linear(1, 1),)
        self.row: Any = None

    def share(self, row: Any) -> None:
        self.row = row


@pytest.mark.parametrize("kind", [FirstToSpeak, Merged])
def test_a_part_in_the_target_s_cache_is_handed_its_row(kind: Kind) -> None:
    inner, plain_part = Sharing(), Every(1)
    drafter = kind([plain_part, FirstToSpeak([inner])])
    assert drafter.shares_cache and not kind([plain_part, NoDrafter()]).shares_cache
    row = object()
    drafter.share(row)
    assert inner.row is row and not hasattr(plain_part, "row")
    assert drafter.modules == inner.modules and drafter.module_seconds == 0.25
    other = drafter.fork()
    assert other.parts[0] is not plain_part and other.parts[1].parts[0] is not inner  # type: ignore[attr-defined]
    assert isinstance(drafter, Drafter)


def test_heads_in_a_hybrid_are_put_in_eval_mode() -> None:
    """Dropout left on would be drafted with; the mode comes back afterwards."""
    own = small_heads("medusa", target())
    own.train()
    seen: list[bool] = []

    class Looking(HeadsDrafter):
        def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
            seen.append(own.training)
            return super().propose(budget, sampler)

    decode(target(), FirstToSpeak([LookupDrafter(), Looking(own)]), Budget.chain(2))
    assert seen and not any(seen) and own.training


def test_stored_costs_are_found_again() -> None:
    """By what the parts are, not by where they lie in memory."""
    made: list[list[Drafter]] = [[LookupDrafter(), HeadsDrafter(heads(kind))] for kind in ("medusa", "medusa", "eagle")]
    first, again, other = (place(target(), Merged(parts)) for parts in made)
    assert first == again != other != place(target(), FirstToSpeak(made[2]))


def test_parts_and_names_belong_together() -> None:
    for given in ([], ["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="a name for each"):
            FirstToSpeak([NoDrafter(), NoDrafter()], given)
    with pytest.raises(ValueError, match="needs drafters"):
        Merged([])
    assert FirstToSpeak([LookupDrafter(), HeadsDrafter(heads("medusa"))]).names == ("lookup", "heads")
