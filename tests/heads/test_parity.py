"""What was trained is what drafts: the training unroll and real decoding give the same states and logits.

Both sides run over the same text. The unroll drafts at every row at once with the text's own tokens; decoding starts,
drafts and advances as a generation does, with drafted tokens forced where the text must be followed. States and
logits agree to rounding, and each of the classic mistakes, planted here, is seen a thousand times over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.eagle as eagle_module
from heads.base import DraftHeads
from heads.draft import Draft
from heads.eagle import Eagle
from heads.eagle_state import EagleGrower, EagleState
from heads.grow import Budget, Sampler
from heads.judge import TrainingBatch
from heads.kv import KVStore
from heads.medusa import Medusa
from heads.target import Target
from tests.heads.small import batch_of, random_ids, read, relative, small_heads, small_target, soft_ce

LENGTH, LOOKAHEAD = 24, 4
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}  # lossless.md, "Equality of states"
Key = tuple[int, int]  # row of the text, draft position

CASES: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa"},
    "medusa draft vocabulary": {"kind": "medusa", "draft_vocab": 20, "layers": 2},
    "medusa own output": {"kind": "medusa", "draft_vocab": 20, "own_output": True},
    "eagle": {"kind": "eagle"},
    "eagle draft vocabulary": {"kind": "eagle", "draft_vocab": 20},
    "eagle fc_norm": {"kind": "eagle", "fc_norm": True},
    "eagle norm_output": {"kind": "eagle", "norm_output": True},
    "eagle 3.1": {"kind": "eagle", "fc_norm": True, "norm_output": True, "draft_vocab": 20},
    "eagle without GQA": {"kind": "eagle", "num_key_value_heads": 4},
    "eagle one key head, wide": {"kind": "eagle", "num_key_value_heads": 1, "head_dim": 16, "taps": (1, 4)},
}
EAGLE = {name: case for name, case in CASES.items() if name in ("eagle", "eagle 3.1")}


def make(case: dict[str, Any], target: Target) -> DraftHeads:
    return small_heads(**{"lookahead": LOOKAHEAD, **case, "target": target})


@dataclass
class Seen:
    """States and logits by row and draft position."""

    states: dict[Key, Tensor] = field(default_factory=dict)
    logits: dict[Key, Tensor] = field(default_factory=dict)

    def worst(self, other: Seen, least: int) -> float:
        """Largest relative difference to ``other``, in states or logits, over at least so many of its keys."""
        assert len(self.logits) >= least and self.logits.keys() <= other.logits.keys()
        assert self.states.keys() == self.logits.keys()
        pairs = [(mine[key], theirs[key]) for mine, theirs in self._tables(other) for key in mine]
        assert all(bool(torch.isfinite(ours).all()) for ours, _ in pairs)
        return max(relative(ours, theirs) for ours, theirs in pairs)

    def _tables(self, other: Seen) -> list[tuple[dict[Key, Tensor], dict[Key, Tensor]]]:
        return [(self.states, other.states), (self.logits, other.logits)]


@contextmanager
def states_of(heads: DraftHeads) -> Iterator[list[Tensor]]:
    """What the output matrix reads, in the order in which it is read: (n, H) each."""
    found: list[Tensor] = []
    hooks = []

    def note(module: Any, inputs: Any, output: Tensor) -> None:
        found.append(output.detach().reshape(-1, output.shape[-1]))

    modules = [heads.norm] if isinstance(heads, Eagle) else list(heads.blocks)  # type: ignore[arg-type]
    if isinstance(heads, Eagle) and heads.config.options["norm_output"]:
        # the norm also feeds the next step; the last reading before logits is theirs
        original = heads.logits

        def logits(out: Tensor) -> Tensor:
            found.append(heads.norm(out).detach().reshape(-1, out.shape[-1]))
            return original(out)

        heads.__dict__["logits"] = logits
        try:
            yield found
        finally:
            del heads.__dict__["logits"]
        return
    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def unrolled(heads: DraftHeads, batch: TrainingBatch, text: int = 0) -> Seen:
    """The training unroll of one text of a batch."""
    seen = Seen()
    with states_of(heads) as states:
        for j, step in enumerate(heads.unroll(batch)):
            for i, (b, row) in enumerate(zip(step.batch.tolist(), step.row.tolist(), strict=True)):
                if b == text:
                    seen.states[row, j], seen.logits[row, j] = states[-1][i], step.logits[i]
    return seen


class Forced(Sampler):
    """Drafts given tokens as if it had drawn them, and keeps the logits it was given."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.places, self.logits = list(places), list[Tensor]()

    def __call__(self, logits: Tensor) -> tuple[int, Tensor]:
        self.logits.append(logits)
        return self.places[len(self.logits) - 1], logits.float().softmax(-1)


def text_for(heads: DraftHeads, length: int = LENGTH, seed: int = 1) -> Tensor:
    """A text that these heads could have drafted."""
    vocab = heads.config.draft_vocab_size or heads.config.vocab_size
    places = random_ids(length, seed=seed, vocab=vocab)
    return places if heads.draft_ids is None else heads.draft_ids[places]


def places_of(heads: DraftHeads, tokens: Sequence[int]) -> list[int]:
    """Draft-vocabulary places of target ids."""
    return list(tokens) if heads.draft_ids is None else [heads.draft_ids.tolist().index(t) for t in tokens]


def decoded(
    heads: DraftHeads, ids: Tensor, taps: Tensor, accepted: Sequence[int], *, prompt: int = 5, between: bool = False
) -> Seen:
    """Decode along a text: each round drafts its next tokens, of which the given number is accepted.

    Args:
        taps: (1, T, taps·H) of the whole text; the decoder is shown what a real one has.
        between: rounds alternate between trees (whose drafts are dropped) and chains.
    """
    seen, last = Seen(), prompt - 1  # the last row with taps
    state = heads.start(taps[:, : last + 1], ids[:, : last + 2])
    for number, stay in enumerate(accepted):
        room = min(LOOKAHEAD, LENGTH - last - 2)
        with states_of(heads) as states:
            if between and number % 2:
                heads.propose(state, Budget(rows=9, depth=LOOKAHEAD, width=3))
            else:
                forced = Forced(places_of(heads, ids[0, last + 2 : last + 2 + room].tolist()))
                draft = heads.propose(state, Budget.chain(room), forced)
                assert list(draft.tokens) == ids[0, last + 2 : last + 2 + room].tolist()
                for j, logits in enumerate(forced.logits):
                    seen.states[last, j], seen.logits[last, j] = states[j][-1], logits
        heads.advance(state, taps[:, last + 1 : last + 2 + stay], ids[:, last + 2 : last + 3 + stay])
        last += stay + 1
    return seen


ROUNDS = [2, 0, 4, 1, 3]  # none, some, all of a draft


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_unroll_and_decoding_agree(case: str, dtype: torch.dtype) -> None:
    target = small_target(dtype=dtype)
    heads = make(CASES[case], target)
    ids = text_for(heads)
    batch = batch_of(target, heads.config.taps, ids)
    whole = unrolled(heads, batch)
    assert len(whole.logits) == (LENGTH - 2) * LOOKAHEAD, "every row at every draft position"
    # a prompt of every length, drafted from at once
    for prompt in (1, 2, 7, LENGTH - LOOKAHEAD - 1):
        taps, _ = read(target, heads.config.taps, ids[:, : prompt + 1])
        assert decoded(heads, ids, taps, [0], prompt=prompt).worst(whole, LOOKAHEAD) <= BOUND[dtype]
    # and round after round, with nothing but chains, and with trees between them
    assert decoded(heads, ids, batch.taps, ROUNDS).worst(whole, 18) <= BOUND[dtype]
    assert decoded(heads, ids, batch.taps, ROUNDS, between=True).worst(whole, 10) <= BOUND[dtype]


@dataclass
class Watched:
    """A grower that keeps the logits of each node (by its path of tokens) on their way through."""

    grower: Any
    logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def first(self) -> Tensor:
        self.logits[()] = self.grower.first()
        return self.logits[()]

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        found: Tensor = self.grower.after(nodes, tokens, parents)
        draft = Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))
        for node, logits in zip(nodes, found, strict=True):
            self.logits[tuple(draft.tokens[i] for i in draft.path(node))] = logits
        return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("budget", [Budget(14, LOOKAHEAD, 3), Budget.static([(0,), (1,), (0, 0), (1, 1), (1, 1, 0)])])
@pytest.mark.parametrize("case", CASES)
def test_each_path_of_a_tree_is_a_text_that_was_trained(
    case: str, budget: Budget, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small_target(dtype=dtype)
    heads = make(CASES[case], target)
    ids, last = text_for(heads), 9
    taps, _ = read(target, heads.config.taps, ids)
    watched: list[Watched] = []

    def grower(state: Any, original: Callable[[Any], Any] = heads.grower) -> Watched:
        watched.append(Watched(original(state)))
        return watched[-1]

    monkeypatch.setitem(heads.__dict__, "grower", grower)
    state = heads.start(taps[:, :5], ids[:, :6])
    heads.propose(state, budget)
    heads.advance(state, taps[:, 5 : last + 1], ids[:, 6 : last + 2])
    heads.propose(state, budget)
    found = watched[-1].logits
    assert len(found) >= 3 and max(map(len, found)) >= 2
    worst = 0.0
    for path, logits in found.items():
        text = torch.cat([ids[:, : last + 2], torch.tensor([path], dtype=torch.long), ids[:, :4]], 1)
        there = torch.full((1, text.shape[1], taps.shape[2]), 7.0, dtype=dtype)  # what no drafter may look at
        there[:, : last + 1] = taps[:, : last + 1]
        batch = batch_of(target, heads.config.taps, text)
        batch.taps = there
        worst = max(worst, relative(logits, unrolled(heads, batch).logits[last, len(path)]))
    assert worst <= BOUND[dtype]


@pytest.mark.parametrize("case", CASES)
def test_other_texts_padding_and_untrained_rows_change_nothing(case: str) -> None:
    target = small_target()
    heads = make(CASES[case], target)
    texts = [text_for(heads, length, seed) for length, seed in ((24, 1), (17, 2), (9, 3))]
    masks = [random_ids(text.shape[1], seed=9, vocab=2).bool() for text in texts]
    alone = [batch_of(target, heads.config.taps, text) for text in texts]

    def pad(values: Sequence[Tensor], filler: float) -> Tensor:
        rows = [value.new_full((1, LENGTH, *value.shape[2:]), filler) for value in values]
        for row, value in zip(rows, values, strict=True):
            row[:, : value.shape[1]] = value
        return torch.cat(rows)

    together = TrainingBatch(
        ids=pad(texts, 0),
        loss_mask=pad(masks, 0),
        mask=pad([one.mask for one in alone], 0),
        **{name: pad([getattr(one, name) for one in alone], 1) for name in ("taps", "hidden", "top", "lse")},
    )
    for text, one in enumerate(alone):
        ours, theirs = unrolled(heads, together, text), unrolled(heads, one)
        rows = {row for row in range(one.ids.shape[1] - 2) if masks[text][0, row + 2]}
        assert {row for row, _ in ours.logits} == rows
        kept = Seen(
            {key: value for key, value in ours.states.items() if sum(key) + 2 < one.ids.shape[1]},
            {key: value for key, value in ours.logits.items() if sum(key) + 2 < one.ids.shape[1]},
        )
        assert kept.worst(theirs, 1) <= 1e-10


@pytest.mark.parametrize("case", ["medusa draft vocabulary", "eagle", "eagle 3.1"])
def test_the_gradient_goes_through_every_step(case: str) -> None:
    """Nothing is detached between steps: the gradient is the slope of the loss, along random directions."""
    target = small_target()
    heads = make(CASES[case], target)
    batch = batch_of(target, heads.config.taps, text_for(heads), random_ids(LENGTH, seed=4, vocab=2).bool())
    parameters = list(heads.parameters())
    assert all(parameter.requires_grad for parameter in parameters)
    heads.loss(batch, soft_ce).total.backward()
    for seed in range(2):
        random = torch.Generator().manual_seed(seed)
        way = [torch.randn(p.shape, generator=random, dtype=p.dtype) for p in parameters]
        slope = sum(float((p.grad * w).sum()) for p, w in zip(parameters, way, strict=True) if p.grad is not None)
        ends = []
        for step in (1e-6, -2e-6, 1e-6):
            with torch.no_grad():
                for parameter, direction in zip(parameters, way, strict=True):
                    parameter += step * direction
                ends.append(float(heads.loss(batch, soft_ce, measure=False).total))
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


# planted mistakes


@contextmanager
def tap_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding reads the layer below."""
    start, advance, target = heads.start, heads.advance, heads.target
    lower = tuple(tap - 1 for tap in heads.config.taps)
    ids = text_for(heads)
    wrong, _ = read(target, lower, ids)

    def rows(taps: Tensor, first: int) -> Tensor:
        return wrong[:, first : first + taps.shape[1]]

    done = [0]

    def start_wrong(taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> Any:
        done[0] = taps.shape[1]
        return start(rows(taps, 0), ids, mask)

    def advance_wrong(state: Any, taps: Tensor, ids: Tensor) -> None:
        advance(state, rows(taps, done[0]), ids)
        done[0] += taps.shape[1]

    patch.setitem(heads.__dict__, "start", start_wrong)
    patch.setitem(heads.__dict__, "advance", advance_wrong)
    yield


@contextmanager
def draft_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drafted nodes stand one position further than they were trained to."""
    after = EagleGrower.after

    def shifted(self: EagleGrower, *args: Any) -> Tensor:
        rotation = Eagle.rotation
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Eagle, "rotation", lambda s, positions, dtype: rotation(s, positions + 1, dtype))
            return after(self, *args)

    patch.setattr(EagleGrower, "after", shifted)
    yield


@contextmanager
def equal_positions(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """All steps of a row stand where its first one does."""
    after = EagleGrower.after

    def flat(self: EagleGrower, *args: Any) -> Tensor:
        rotation, row = Eagle.rotation, self.state.rows - 1
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Eagle, "rotation", lambda s, p, dtype: rotation(s, torch.full_like(p, row), dtype))
            return after(self, *args)

    patch.setattr(EagleGrower, "after", flat)
    yield


@contextmanager
def committed_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows committed after the prefill stand one position further."""
    catch_up = EagleState.catch_up

    def shifted(self: EagleState) -> Tensor:
        rotation, extra = Eagle.rotation, int(self.rows > 0)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Eagle, "rotation", lambda s, positions, dtype: rotation(s, positions + extra, dtype))
            return catch_up(self)

    patch.setattr(EagleState, "catch_up", shifted)
    yield


@contextmanager
def stale_draft(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The draft before is never forgotten."""
    patch.setattr(KVStore, "crop", lambda self, length: None)
    yield


@contextmanager
def last_drafted_row_missing(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """When all of a draft was accepted, its last token's row is not committed (lossless.md, trap 10)."""
    commit = EagleState.commit

    def short(self: EagleState, taps: Tensor, tokens: Tensor) -> None:
        keep = [i for i in range(taps.shape[1]) if taps.shape[1] <= LOOKAHEAD or i != LOOKAHEAD - 1]
        commit(self, taps[:, keep], tokens[:, keep])

    patch.setattr(EagleState, "commit", short)
    yield


@contextmanager
def later_steps_of_other_rows_seen(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, step j's row also attends the later steps of the rows before it."""

    def attend(q: Tensor, k0: Tensor, v0: Tensor, causal: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        rows = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        mask = torch.cat([causal[0], *(rows for _ in own)], 1)
        k, v = torch.cat([k0, *(k for k, _ in own)], 2), torch.cat([v0, *(v for _, v in own)], 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    patch.setattr(eagle_module, "_attend_unrolled", attend)
    yield


@contextmanager
def future_rows_seen(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a row also attends the next one."""
    attend = eagle_module._attend_unrolled

    def late(q: Tensor, k0: Tensor, v0: Tensor, causal: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return attend(q, k0, v0, torch.cat([causal[..., :1], causal[..., :-1]], -1), own)

    patch.setattr(eagle_module, "_attend_unrolled", late)
    yield


@contextmanager
def hidden_shifted_between_steps(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a step reads the state of the row before, as EAGLE's data is shifted."""
    feed_back = Eagle.feed_back
    patch.setattr(Eagle, "feed_back", lambda self, out: feed_back(self, out.roll(1, -2) if out.dim() == 3 else out))
    yield


@contextmanager
def token_shifted(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding pairs a row's taps with its own token instead of the next."""
    start = heads.start
    patch.setitem(heads.__dict__, "start", lambda taps, ids: start(taps, ids.roll(1, 1)))
    yield


@contextmanager
def head_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drafting starts with the second head."""
    head = Medusa.head
    decoding = pytest.MonkeyPatch()
    grower = Medusa.grower

    def wrong(self: Medusa, state: Any) -> Any:
        made = grower(self, state)
        decoding.setitem(self.__dict__, "head", lambda k, hidden: head(self, (k + 1) % LOOKAHEAD, hidden))
        return made

    patch.setattr(Medusa, "grower", wrong)
    try:
        yield
    finally:
        decoding.undo()


@contextmanager
def row_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding stays on the root's state when the draft's tokens were accepted."""
    patch.setattr(Medusa, "advance", lambda self, state, taps, ids: setattr(state, "hidden", taps[:, :1]))
    yield


Mistake = Callable[[DraftHeads, pytest.MonkeyPatch], Any]
ANY: list[Mistake] = [tap_off_by_one]
IN_EAGLE: list[Mistake] = [
    *ANY,
    draft_position_off_by_one,
    equal_positions,
    committed_position_off_by_one,
    stale_draft,
    last_drafted_row_missing,
    later_steps_of_other_rows_seen,
    future_rows_seen,
    hidden_shifted_between_steps,
    token_shifted,
]
IN_MEDUSA: list[Mistake] = [*ANY, head_off_by_one, row_off_by_one]
PLANTED = [(case, mistake) for case in EAGLE for mistake in IN_EAGLE] + [("medusa", mistake) for mistake in IN_MEDUSA]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("case", "mistake"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_planted_mistakes_exceed_the_bound_a_thousandfold(
    case: str, mistake: Mistake, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small_target(dtype=dtype)
    heads = make(CASES[case], target)
    ids = text_for(heads)
    batch = batch_of(target, heads.config.taps, ids)
    with mistake(heads, monkeypatch):
        whole = unrolled(heads, batch)
        worst = decoded(heads, ids, batch.taps, [4, 1, 0, 2]).worst(whole, 16)
    assert worst > 1000 * BOUND[dtype]
