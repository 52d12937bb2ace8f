"""The decoding loop: draft → verify in one target pass → commit, until something says stop.

prefill the prompt, emit its next token                                        (the root)
repeat
    tell the drafter what was committed; let it propose a draft
    one target pass over [root, nodes…]; a row sees the text and its own ancestors, at position parent + 1
    the rule walks down the draft: accepted tokens, then one token of the target's own
    keep the keys and values of root and accepted nodes, forget the rest
    emit up to the first stop
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target, TargetOutput
from infer.cache import ForgettingCache
from infer.drafters import Drafter
from infer.metrics import Round, Stats
from infer.processors import NodeScores
from infer.stopping import Stop
from infer.tokens import Tokens
from infer.verify import Chooser, RandomChooser, Rule, choose_rule


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
    stats: Stats = field(default_factory=Stats)
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = ForgettingCache(self.target) if self.cache is None else self.cache
        self.tokens = Tokens(self.ids if self.shown is None else self.shown)
        self.padding = len(self.tokens) - self.ids.shape[1]  # positions count without it

    @torch.inference_mode()
    def run(self) -> Iterator[list[int]]:
        """Decode; yields the tokens of the prefill and then of each round, stops included.

        Raises:
            PositionLimit: the target has no position for the next token (what was yielded stands).
        """
        started = time.perf_counter()
        self._positions_left()
        out = self._pass(self.ids, torch.arange(self.ids.shape[1])[None], None, last_only=True)
        _, emitted, done = self._verify(Draft.empty(), out)
        taps, known = out.taps, torch.cat([self.ids, self.ids.new_tensor([emitted])], 1)
        self.stats.prefill_seconds = time.perf_counter() - started
        yield emitted

        while not done:
            started, inside = time.perf_counter(), self.drafter.module_seconds
            if self.stats.log:
                self.drafter.commit(taps, emitted)
            else:
                self.drafter.begin(self.target, known, taps)
            draft = self._propose()
            drafted = time.perf_counter()

            base = self.cache.length
            rows = torch.tensor([[self.tokens.last, *draft.tokens]])
            depths = torch.tensor([[0, *draft.depths]])
            out = self._pass(rows, base + depths, self._mask(draft, base))
            passed = time.perf_counter()

            path, emitted, done = self._verify(draft, out)
            kept = [0, *(1 + node for node in path)]
            self.cache.keep(base, [kept])
            taps = None if out.taps is None else out.taps[:, kept]
            self.stats.log.append(
                Round(
                    proposed=len(draft),
                    depth=max(draft.depths, default=0),
                    accepted=min(len(path), len(emitted)),
                    emitted=len(emitted),
                    seconds=time.perf_counter() - started,
                    target_seconds=passed - drafted,
                    draft_seconds=self.drafter.module_seconds - inside,
                    draft_total_seconds=drafted - started,
                )
            )
            yield emitted

    def _positions_left(self) -> int | None:
        """How many positions the target has behind the committed text; None when it has no limit."""
        most = self.target.max_positions
        if most is None:
            return None
        at = len(self.tokens) - self.padding
        if at > most:
            raise PositionLimit(
                f"{self.target.name} has {most} positions and the text has {at} tokens: "
                "shorten the prompt or ask for fewer new tokens"
            )
        return most - at

    def _propose(self) -> Draft:
        """A draft no longer than what may still be emitted and what the target has positions for."""
        positions = self._positions_left()
        room = self.stop.left(self.tokens) - 1
        if positions is not None:
            room = min(room, positions)
        budget = self.budget.within(max(room, 0))
        if budget.depth == 0 or budget.rows < 2:
            return Draft.empty()
        draft = self.drafter.propose(budget, self.sampler).shorten(depth=budget.depth, nodes=budget.rows - 1)
        if any(not 0 <= token < self.target.vocab_size for token in draft.tokens):
            raise ValueError(f"the drafter proposed ids outside the target's vocabulary of {self.target.vocab_size}")
        return draft

    def _mask(self, draft: Draft, base: int) -> Tensor | None:
        """Bool (1, 1, 1+n, base+1+n): the committed text and the row's own ancestors; None when all is visible."""
        if not len(draft):
            return None
        n = 1 + len(draft)
        return torch.cat([torch.ones(n, base, dtype=torch.bool), draft.visibility()], 1)[None, None]

    def _pass(self, ids: Tensor, positions: Tensor, mask: Tensor | None, *, last_only: bool = False) -> TargetOutput:
        device = self.target.device
        out = self.target.forward(
            ids.to(device),
            cache=self.cache,
            mask=None if mask is None else mask.to(device),
            positions=positions.to(device),
            taps=self.drafter.taps,
            logits_to_keep=int(last_only),
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next step waits for it anyway; here the clock sees it too
        return out

    def _verify(self, draft: Draft, out: TargetOutput) -> tuple[list[int], list[int], bool]:
        """Accepted path, tokens emitted (up to the first stop), and whether to stop."""
        at = NodeScores(self.processors, out.logits[0], draft, self.tokens, exact=self.target.dtype == torch.float64)
        rule = self.rule or choose_rule(draft, self.do_sample)
        path, last = rule(draft, at, self.chooser)
        emitted: list[int] = []
        done = False
        for node, token in zip([-1, *path], [*(draft.tokens[node] for node in path), last], strict=True):
            self.tokens.append(token)
            emitted.append(token)
            if self.keep_scores:
                self.scores.append(at.scores(node))
                self.logits.append(at.logits[node + 1])
            done = self.stop.reached(self.tokens, tuple(s[None] for s in self.scores) if self.keep_scores else None)
            if done:
                break
        self.stats.tokens += len(emitted)
        return path, emitted, done
