"""Exact laws: every way a round can go, over small vocabularies, and rounds put together to texts.

What a round emits is computed by taking every branch of drafting and deciding, its last token by its distribution.
A text's law follows from the rounds': the rounds of one context are worked out once and used wherever it comes up.
Drafts are grown by the real code (``heads.grow``) from a table; only its random numbers come from the enumeration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler, grow
from infer.verify import Chooser, Rule, block, token, traversal
from tests.infer.fakes import Branching, OneNumber, enumerate_law, table

Text = tuple[int, ...]
Make = Callable[[Chooser, Text], Draft]


class Context:
    """A table that looks at no more than the last ``order`` tokens: few different rounds."""

    def __init__(self, logits: Callable[[Text], Tensor], order: int) -> None:
        self._logits, self.order = logits, order
        self._known: dict[Text, Tensor] = {}

    def logits(self, text: Text) -> Tensor:
        return self._logits(self.of(text))

    def __call__(self, text: Text) -> Tensor:
        """Distribution (V,), float64."""
        key = self.of(text)
        if key not in self._known:
            self._known[key] = self._logits(key).softmax(-1)
        return self._known[key]

    def of(self, text: Text) -> Text:
        return text[len(text) - self.order :]


class TableAt:
    """The target's view of a pass over a draft, from a table."""

    foresight = True

    def __init__(self, p_after: Callable[[Text], Tensor], text: Text, draft: Draft) -> None:
        self._p_after, self._text, self._draft = p_after, text, draft

    def p(self, node: int) -> Tensor:
        return self._p_after((*self._text, *(self._draft.tokens[i] for i in self._draft.path(node))))

    peek = p

    def best(self, node: int) -> int:
        return int(self.p(node).argmax())

    def settle(self, path: Sequence[int]) -> None:
        pass


@dataclass
class World:
    """A target and a drafter that finds likely what the target finds unlikely, as far as ``opposed`` says."""

    vocab: int
    seed: int
    order: int = 1
    opposed: float = 1.0
    target: Context = field(init=False)

    def __post_init__(self) -> None:
        p, own = table(self.vocab, self.seed), table(self.vocab, self.seed + 1000)
        self.target = Context(p, self.order)
        self._draft = Context(lambda text: own(text) - self.opposed * p(text), self.order)

    def draft_logits(self, text: Text) -> Tensor:
        return self._draft.logits(text)

    def contexts(self) -> list[Text]:
        return list(product(range(self.vocab), repeat=self.order))


class Drawing(Sampler):
    """The real sampler, its draws taken by a chooser."""

    def __init__(self, chooser: Chooser) -> None:
        super().__init__()
        self.chooser = chooser

    def draw(self, q: Tensor) -> int:
        return self.chooser.sample(q)


class Growing:
    """What heads would answer, read from a table."""

    def __init__(self, logits_after: Callable[[Text], Tensor], text: Text, ids: Tensor | None = None) -> None:
        self.logits_after, self.text, self.ids = logits_after, text, ids

    def _logits(self, text: Text) -> Tensor:
        logits = self.logits_after(text)
        return logits if self.ids is None else logits[self.ids]

    def first(self) -> Tensor:
        return self._logits(self.text)

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        draft = Draft(tuple(tokens), tuple(parents[: len(tokens)]), (None,) * len(tokens))
        return torch.stack([self._logits((*self.text, *(tokens[i] for i in draft.path(node)))) for node in nodes])


def grown(world: World, budget: Budget, *, draw: bool = True, ids: Tensor | None = None) -> Make:
    """Drafts as heads make them: drawn, or the likeliest."""

    def make(chooser: Chooser, text: Text) -> Draft:
        growing = Growing(world.draft_logits, text, ids)
        return grow(growing, budget, Drawing(chooser) if draw else None, ids)

    return make


DRAWS_LAST: set[Rule] = {token, block, traversal}  # which draw one token, to end the round


class Folding(Branching):
    """Leaves the last question, which token ends the round, open: its distribution is the answer."""

    last: Tensor | None = None

    def sample(self, distribution: Tensor) -> int:
        self.last = distribution
        return -1


@dataclass
class Round:
    """What a round emits, with probabilities, and what becomes of its draft.

    Attributes:
        law: emitted tokens → probability.
        rejected: probability that the accepted path ends where the draft went on.
        accepted: expected number of accepted tokens.
    """

    law: dict[Text, float] = field(default_factory=lambda: defaultdict(float))
    rejected: float = 0.0
    accepted: float = 0.0


def drafts_of(make: Make, text: Text) -> list[tuple[float, Draft]]:
    """Every draft behind ``text`` with its probability."""
    drafts: list[tuple[float, Draft]] = []

    def run(chooser: Branching) -> None:
        draft = make(chooser, text)
        drafts.append((chooser.weight, draft))

    enumerate_law(run)
    return drafts


def round_of(rule: Rule, drafts: Sequence[tuple[float, Draft]], p_after: Callable[[Text], Tensor], text: Text) -> Round:
    """Every way one round behind ``text`` can go."""
    out = Round()
    for chance, draft in drafts:
        at = TableAt(p_after, text, draft)

        def run(chooser: Branching, chance: float = chance, draft: Draft = draft, at: TableAt = at) -> None:
            path, own = rule(draft, at, chooser)
            weight = chance * chooser.weight
            emitted = tuple(draft.tokens[node] for node in path)
            last = getattr(chooser, "last", None)
            for end, share in enumerate(_normed(last)) if last is not None else [(own, 1.0)]:
                out.law[*emitted, end] += weight * share
            out.rejected += weight * bool(draft.children(path[-1] if path else -1))
            out.accepted += weight * len(path)

        enumerate_law(run, Folding if rule in DRAWS_LAST else Branching)
    return out


def _normed(weights: Tensor) -> list[float]:
    weights = weights.double()
    return (weights / weights.sum()).tolist()


def texts_law(rounds: Callable[[Text], Round], text: Text, length: int) -> dict[Text, float]:
    """Law of the next ``length`` tokens, round after round."""
    if length == 0:
        return {(): 1.0}
    law: dict[Text, float] = defaultdict(float)
    for emitted, weight in rounds(text).law.items():
        if weight == 0:
            continue
        emitted = emitted[:length]
        for rest, share in texts_law(rounds, (*text, *emitted), length - len(emitted)).items():
            law[*emitted, *rest] += weight * share
    return law


def target_law(p_after: Callable[[Text], Tensor], text: Text, length: int, vocab: int) -> dict[Text, float]:
    """The same law by the target alone."""
    law = {}
    for more in product(range(vocab), repeat=length):
        weight = 1.0
        for at, name in enumerate(more):
            weight *= float(p_after((*text, *more[:at]))[name])
        law[more] = weight
    return law


def check_law(rule: Rule, make: Make, world: World, length: int, *, rejected: float = 0.3) -> None:
    """The joint law of ``length`` tokens, at least two rounds, to 1e-12, with so many drafts rejected."""
    made = {context: round_of(rule, drafts_of(make, context), world.target, context) for context in world.contexts()}
    start = world.contexts()[-1]
    ours = texts_law(lambda text: made[world.target.of(text)], start, length)
    theirs = target_law(world.target, start, length, world.vocab)
    worst = max(abs(ours.get(text, 0.0) - weight) for text, weight in theirs.items())
    assert worst <= 1e-12, f"largest difference of a probability: {worst}"
    assert abs(sum(ours.values()) - 1) <= 1e-12
    share = sum(out.rejected for out in made.values()) / len(made)
    assert share >= rejected, f"only {share:.0%} of drafts are rejected: this proves little"


def reusing(rule: Rule, make: Make, p_after: Callable[[Text], Tensor], text: Text, grid: int = 400) -> Round:
    """A round whose every decision reads the same uniform number, over a grid of numbers."""
    out = Round()
    for k in range(grid):
        chooser = OneNumber((k + 0.5) / grid)
        draft = make(chooser, text)
        path, end = rule(draft, TableAt(p_after, text, draft), chooser)
        out.law[*(draft.tokens[node] for node in path), end] += 1 / grid
    return out


def worlds(count: int, vocab: int, order: int = 1) -> Iterator[World]:
    """Drafters from opposed to all but agreeing."""
    for seed in range(count):
        yield World(vocab, seed, order, opposed=(1.0, 0.5, -0.5, -0.9)[seed % 4])


def completed(out: Round, p_after: Callable[[Text], Tensor], text: Text, length: int, vocab: int) -> dict[Text, float]:
    """Law of ``length`` tokens when the target itself goes on behind one round."""
    law: dict[Text, float] = defaultdict(float)
    for emitted, weight in out.law.items():
        behind = target_law(p_after, (*text, *emitted), length - len(emitted), vocab)
        for rest, share in behind.items():
            law[*emitted, *rest] += weight * share
    return law


def distance(ours: dict[Text, float], theirs: dict[Text, float]) -> float:
    """Total variation."""
    return sum(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in {*ours, *theirs}) / 2
