"""One text while it is decoded: what it was asked for, what is committed, what its drafter knows, when it ends.

The loop over rounds, for one text or many, is :mod:`infer.rounds`; here is what happens to each text in a round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.inside import ExtraRows
from heads.target import Target
from infer.drafters import Drafter, Inside
from infer.metrics import Round, Stats
from infer.processors import NodeScores
from infer.rounds import Rounds
from infer.stopping import Stop
from infer.tokens import Tokens
from infer.verify import Chooser, RandomChooser, Rule, choose_rule

if TYPE_CHECKING:
    from infer.control import Control


class PositionLimit(ValueError):
    """The text has reached the last position the target has."""


@dataclass
class Decoding:
    """Everything one text is decoded with, and what came of it.

    Attributes:
        target: the model; in eval mode.
        ids: (1, n) prompt without padding.
        drafter: what proposes.
        budget: how much a round may draft.
        stop: when to stop.
        shown: (1, m) prompt as processors, criteria and the caller see it, padding included; ``ids`` by default.
        processors: the user's logits processors.
        do_sample: sample instead of taking the arg-max.
        rule: acceptance rule; None chooses by what each draft is (``verify.choose_rule``).
        chooser: where random decisions come from.
        sampler: draws drafted chains; None drafts the likeliest tokens.
        keep_scores: collect processed scores (V,) and raw logits (V,) of every emitted token.
        cache: the target's; a new one by default.
        control: decides each round's budget in place of ``budget``.
        fixed_rows: every pass has exactly so many rows (a text alone; :class:`~infer.rounds.Rounds` has its own).
        done: the text has ended.
    """

    target: Target
    ids: Tensor
    drafter: Drafter
    budget: Budget
    stop: Stop
    shown: Tensor | None = None
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    do_sample: bool = False
    rule: Rule | None = None
    chooser: Chooser = field(default_factory=RandomChooser)
    sampler: Sampler | None = None
    keep_scores: bool = False
    cache: Any = None
    control: Control | None = None
    fixed_rows: int | None = None
    done: bool = False
    stats: Stats = field(default_factory=Stats)
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = Tokens(self.ids if self.shown is None else self.shown)
        self.padding = len(self.tokens) - self.ids.shape[1]  # positions count without it
        self._untold: tuple[Tensor | None, list[int]] = (None, [])  # what the drafter does not know yet
        self.inside: Inside | None = getattr(self.drafter, "inside", None)
        self.extra = ExtraRows()  # of the round's pass, for a drafter that drafts inside it

    def run(self) -> Iterator[list[int]]:
        """Decode alone; yields the tokens of the prefill and then of each round, stops included.

        Raises:
            PositionLimit: the target has no position for the next token (what was yielded stands).
        """
        for (emitted,) in Rounds([self], cache=self.cache, fixed_rows=self.fixed_rows).run():
            yield emitted

    def read(self, logits: Tensor, taps: Tensor | None) -> list[int]:
        """The prefill came back: logits (1, V) of its last row, taps (1, n, taps·H); the first token."""
        _, emitted = self._verify(Draft.empty(), logits)
        self._untold = taps, emitted
        return emitted

    def propose(self, batch: int) -> Draft:
        """Tell the drafter what was committed, and let it draft.

        The draft is no longer than what may still be emitted and what the target has positions for.

        Args:
            batch: texts alive, which a look-ahead control takes into account.
        """
        taps, emitted = self._untold
        if self.stats.log:
            self.drafter.commit(taps, emitted)
        else:
            known = torch.cat([self.ids, self.ids.new_tensor([emitted])], 1)
            self.drafter.begin(self.target, known, taps)
        positions = self.positions_left()
        room = self.stop.left(self.tokens) - 1
        if positions is not None:
            room = min(room, positions)
        wanted = self.budget if self.control is None else self._ask(self.control, batch)
        if self.fixed_rows is not None:
            wanted = wanted.fit(self.fixed_rows)
        budget = wanted.within(max(room, 0))
        self.extra = ExtraRows()
        if budget.depth == 0 or budget.rows < 2:
            return Draft.empty()
        tokens = budget if self.inside is None else self.inside.reserve(budget)
        draft = self.drafter.propose(tokens, self.sampler)
        if not isinstance(draft, Draft):
            raise ValueError(f"{type(self.drafter).__name__} proposed a {type(draft).__name__}, not a Draft")
        draft = draft.shorten(depth=tokens.depth, nodes=tokens.rows - 1)
        if any(not 0 <= token < self.target.vocab_size for token in draft.tokens):
            raise ValueError(f"the drafter proposed ids outside the target's vocabulary of {self.target.vocab_size}")
        if self.inside is not None:
            self.extra = self.inside.extra_rows(draft, budget, room)
        return draft

    def _ask(self, control: Control, batch: int) -> Budget:
        match = getattr(self.drafter, "match", None)
        return control.budget(batch) if match is None else control.budget(batch, match)

    def settle(
        self, draft: Draft, logits: Tensor, taps: Tensor | None, added: Tensor | None
    ) -> tuple[list[int], list[int]]:
        """The pass over root and draft came back: logits (1+n, V), taps (1, 1+n, taps·H), and those of added rows.

        Returns:
            The accepted nodes, from the root downwards, and the tokens emitted, up to the first stop.
        """
        path, emitted = self._verify(draft, logits)
        if self.inside is not None:
            assert added is not None, "what drafts inside a pass reads taps"
            self.inside.read(added[:, self.extra.behind(path[-1] if path else -1)])
        self._untold = None if taps is None else taps[:, [0, *(1 + node for node in path)]], emitted
        return path, emitted

    def record(self, draft: Draft, path: list[int], done: Round) -> None:
        """A round of this text is over."""
        self.stats.log.append(done)
        if self.control is not None:
            self.control.observe(draft, path, done)

    def positions_left(self) -> int | None:
        """How many positions the target has behind the committed text; None when it has no limit.

        Raises:
            PositionLimit: not even the last token has one.
        """
        most, what = self.target.max_positions, "positions"
        border = self.target.rotary_border
        if border is not None and self.ids.shape[1] <= border:
            most, what = border, "positions before its LongRoPE factors change, where no text can be taken over"
        if most is None:
            return None
        at = len(self.tokens) - self.padding
        if at > most:
            raise PositionLimit(
                f"{self.target.name} has {most} {what}, and the text has {at} tokens: "
                "shorten the prompt or ask for fewer new tokens"
            )
        return most - at

    def _verify(self, draft: Draft, logits: Tensor) -> tuple[list[int], list[int]]:
        at = NodeScores(self.processors, logits, draft, self.tokens, exact=self.target.dtype == torch.float64)
        rule = self.rule or choose_rule(draft, self.do_sample, at)
        path, last = rule(draft, at, self.chooser)
        emitted: list[int] = []
        for node, token in zip([-1, *path], [*(draft.tokens[node] for node in path), last], strict=True):
            self.tokens.append(token)
            emitted.append(token)
            if self.keep_scores:
                self.scores.append(at.scores(node))
                self.logits.append(at.logits[node + 1])
            scores = tuple(s[None] for s in self.scores) if self.keep_scores else None
            self.done = self.stop.reached(self.tokens, scores)
            if self.done:
                break
        self.stats.tokens += len(emitted)
        return path, emitted
