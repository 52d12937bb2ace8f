"""Look-ahead control: each round drafts as far, and as widely, as has been paying lately, or not at all.

A budget is worth its expected tokens over its seconds (:mod:`infer.lookahead`); the first come from what was accepted
in past rounds (:mod:`infer.tracking`), the second from a cost table and the number of texts decoded together. Nothing
of the draft at hand is looked at, so the choice changes no law. Drafters that tell how likely their tokens are to be
accepted are given floors with a chain, below which they end it themselves (:mod:`infer.trust`).

What may be lost is bounded by an account. Every round adds what it cost above ``1 + SLACK`` times what plain decoding
would have needed for the same tokens, never below zero; a draft is allowed only if the account stays below ``TRIAL``
plain rounds even when nothing of it is accepted. So over any stretch of text, whatever the drafter does,

    seconds ≤ (1 + SLACK) · plain seconds + TRIAL plain rounds

by the table. While drafting does not pay, the cheapest draft that could pay is tried again after 8, 16, 32 and then
every 64 rounds; the first success makes the next round try, and halves what counted before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Protocol

from heads.draft import Draft
from heads.grow import Budget
from infer.lookahead import PLAIN, likeliest
from infer.metrics import Round
from infer.tracking import STALE, Tracker, Voice
from infer.trust import Word

SLACK = 0.04
TRIAL = 4.0
FIRST_WAIT, LONGEST_WAIT = 8, 64  # plain rounds before drafting is tried again
TREE_ROWS = (4, 8, 16, 32)
TREE_WIDTH = 8
RANKS = 4  # children a node is credited with, since what stands behind them adds little


class Control(Protocol):
    """Decides how much a round drafts. One may serve all texts of a batch."""

    def budget(self, batch: int, match: int = 0) -> Budget:
        """How much a text may draft in the next round, ``batch`` of them alive; asked again, the same answer.

        Args:
            match: of drafters with an attribute ``match``, its value before this draft.
        """
        ...

    def observe(self, draft: Draft, path: Sequence[int], done: Round) -> None:
        """What became of one text's draft: its accepted nodes, from the root downwards, and the round's figures."""
        ...


class Costs(Protocol):
    """Seconds of a round's parts; a :class:`~infer.lookahead.CostTable` or :class:`~infer.live.LiveCosts`."""

    def target(self, rows: int, batch: int = 1) -> float:
        """A pass over ``batch`` texts with ``rows`` rows each."""
        ...

    def draft(self, depth: int, width: int) -> float:
        """One text's draft."""
        ...

    def round(self, budget: Budget, batch: int = 1) -> float:
        """All of a round."""
        ...


class AdaptiveControl:
    """Chooses by cost and acceptance; the same table and the same past give the same choice.

    Args:
        costs: what rounds cost. One with a method ``learn(asked, rows, batch, done)`` is told every round's seconds.
        depth: deepest draft; 0 never drafts.
        tree_rows: rows of the trees by confidence to consider; () for chains only.
        width: of these trees.
        slack: share of plain decoding's seconds that drafting may cost for as long as it does not pay.
        trial: plain rounds that may be lost beyond it.

    Attributes:
        chains: the chains to choose from, shallowest first.
    """

    def __init__(
        self,
        costs: Costs,
        depth: int,
        *,
        tree_rows: Sequence[int] = (),
        width: int = TREE_WIDTH,
        slack: float = SLACK,
        trial: float = TRIAL,
    ) -> None:
        if depth < 0 or slack < 0 or trial < 0:
            raise ValueError(f"depth, slack and trial must not be negative: {depth}, {slack}, {trial}")
        self.costs, self.slack, self.trial = costs, slack, trial
        self.tracker, self.word = Tracker(), Word()
        self.lost = 0.0  # the account, in plain rounds of one text
        self.chains = [Budget.chain(k) for k in range(1, depth + 1)]
        depths = sorted({(depth + 1) // 2, depth}) if depth else []
        self._trees = [Budget(rows, d, width) for d in depths for rows in sorted(tree_rows)]
        self._learn = getattr(costs, "learn", None)
        # differences of neighbouring sizes are the table's: what a clock says of single rounds is too coarse for them
        self._prices: Costs = getattr(costs, "table", costs)
        self._asked, self._batch = PLAIN, 1
        self._answer: Budget | None = None
        self._probing = self._tried = self._hit = False
        self._waited = 0.0  # rounds since something was drafted
        self._wait = FIRST_WAIT

    def budget(self, batch: int = 1, match: int = 0) -> Budget:
        """See :class:`Control`."""
        if self._answer is None or batch != self._batch:
            self._batch = batch
            self._answer = self._choose(batch)
        self._asked = self._answer
        return self._answer

    def observe(self, draft: Draft, path: Sequence[int], done: Round) -> None:
        """See :class:`Control`."""
        asked, batch = self._asked, self._batch
        self._answer = None
        rows = max(done.rows if batch == 1 else asked.rows, 1 + len(draft))  # a drafter may have added some
        if self._learn is not None:
            self._learn(self._timed(asked), rows, batch, done)
        plain = self.costs.round(PLAIN, batch)
        overhead = plain - self.costs.target(1, batch)
        spent = self.costs.target(rows, batch) + overhead + batch * self._drafting(asked)
        self.lost = max(0.0, self.lost + spent / plain - (1 + self.slack) * (1 + len(path)))
        self._count(asked, draft, path)

    def _count(self, asked: Budget, draft: Draft, path: Sequence[int]) -> None:
        """Take in what became of a draft that was ``asked`` for."""
        if asked.depth == 0:
            self._waited += 1 / self._batch
            return
        if len(draft):
            self._waited = 0.0
            self._tried |= self._probing
            self._hit |= self._probing and len(path) > 0
        self.tracker.observe(asked, draft, path, STALE if self._probing and path else 1.0)
        self.word.observe(draft, path)

    def _timed(self, budget: Budget) -> Budget:
        """What the cost table knows a budget's draft as."""
        return budget

    def _drafting(self, budget: Budget) -> float:
        """Seconds of one text's draft under a budget."""
        timed = self._timed(budget)
        return self.costs.draft(timed.depth, timed.width)

    def _round(self, budget: Budget, batch: int) -> float:
        """Seconds of all of a round."""
        return self.costs.round(budget, batch)

    def _choose(self, batch: int) -> Budget:
        if self._tried:
            self._wait = 0 if self._hit else min(max(2 * self._wait, FIRST_WAIT), LONGEST_WAIT)
            self._tried = self._hit = False
        plain = self.costs.round(PLAIN, batch)
        best, speed = PLAIN, 1 / plain
        for budget, tokens, seconds in self._expected(batch):
            if tokens > speed * seconds and self._affordable(budget, batch, plain):
                best, speed = budget, tokens / seconds
        self._probing = False
        if self._waited >= self._wait and self._idle(best):
            probe = next((b for b in self._probes(batch) if self._could_pay(b, batch, plain)), None)
            if probe is not None and self._affordable(probe, batch, plain):
                self._probing = True
                return probe
        return self._with_floors(best, speed, plain, batch)

    def _with_floors(self, best: Budget, speed: float, plain: float, batch: int) -> Budget:
        """The same for a drafter that can end its chains itself."""
        if best.width > 1 or best.depth == 0 or not self.word.given or self.word.whole():
            return best
        rate = speed * plain / self._prices.round(PLAIN, batch)  # tokens a second, were the clock the table's
        return replace(best, floors=self.word.floors(self._prices, best.depth, rate, batch))

    def _idle(self, best: Budget) -> bool:
        """Whether what is to be tried now and then would not be used."""
        return best is PLAIN

    def _probes(self, batch: int) -> Sequence[Budget]:
        """What is tried then, the first that could pay."""
        return self.chains

    def _could_pay(self, budget: Budget, batch: int, plain: float) -> bool:
        """Whether it would, were everything accepted."""
        return (1 + budget.depth) * plain > self._round(budget, batch)

    def _affordable(self, budget: Budget, batch: int, plain: float) -> bool:
        """Whether the account can bear that nothing of it is accepted."""
        worst = self._round(budget, batch) / plain - (1 + self.slack)
        return self.lost + batch * worst <= self.trial * batch

    def _expected(self, batch: int) -> Iterable[tuple[Budget, float, float]]:
        """Each budget with the tokens it should yield a text and the seconds it should take."""
        return self.ways(self.tracker, batch)

    def ways(self, tracker: Tracker, batch: int) -> Iterable[tuple[Budget, float, float]]:
        """All chains and trees, by what a tracker has seen."""
        shares = tracker.shares()
        worth = [(share, *_chain_worth(voice, len(self.chains), tracker.drawn(False))) for share, voice in shares]
        plain_rows = self.costs.target(1, batch)
        overhead = self.costs.round(PLAIN, batch) - plain_rows
        for at, budget in enumerate(self.chains):
            tokens, seconds = 0.0, batch * self._drafting(budget) + overhead
            for share, joint, reach in worth:
                tokens += share * (1 + sum(joint[: at + 1]))
                if batch > 1:  # the longest draft of all texts sets the rows
                    seconds += share * self.costs.target(budget.rows, batch)
                    continue
                ends = [*(a - b for a, b in pairwise(reach[: at + 1])), reach[at]]
                seconds += share * (1 - reach[0]) * plain_rows
                seconds += share * sum(end * self.costs.target(d + 2, 1) for d, end in enumerate(ends))
            yield budget, tokens, seconds
        for depth in dict.fromkeys(tree.depth for tree in self._trees):
            trees = [tree for tree in self._trees if tree.depth == depth]
            gains = [(share, _tree_worth(voice, trees[-1], tracker.drawn(True))) for share, voice in shares]
            for tree in trees:
                tokens = sum(share * gain[min(tree.rows - 1, len(gain) - 1)] for share, gain in gains)
                silent = sum(share for share, voice in shares if voice.silent) if batch == 1 else 0.0
                saved = silent * (self.costs.target(tree.rows, batch) - plain_rows)
                yield tree, tokens, self._round(tree, batch) - saved


def _chain_worth(voice: Voice, depth: int, drawn: bool) -> tuple[list[float], list[float]]:
    """By depth: P(a chain is so deep and holds so far), and P(it is so deep)."""
    reach = voice.reaches(depth)
    held = accumulate((row[0] for row in voice.acceptance(drawn, depth)), lambda a, b: a * b)
    return [r * h for r, h in zip(reach, held, strict=True)], reach


def _tree_worth(voice: Voice, largest: Budget, drawn: bool) -> list[float]:
    """By number of nodes, from 0: expected tokens of the best static tree; one grown by confidence yields no less."""
    ranks = voice.acceptance(drawn, largest.depth, min(largest.width, RANKS))
    chances = (chance for _, chance in islice(likeliest(ranks), largest.rows - 1))
    return list(accumulate(chances, initial=1.0))
