"""Does sampled text follow the target's law? Many first rounds from one prompt, counted against what they should be.

For each prompt the real loop is started again and again, behind the same first token, and stopped after its first
round with a draft (heads that draft inside the pass have none before the second). Each token of the round is one
observation of the target's distribution behind the tokens before it: the first always, later ones where the draft
before them was accepted. What it should be comes from passes of the target alone. Counts are compared by chi-square,
position by position, each conditioned on what came before it.

A wrong rule shows where drafts are often rejected and yet often right. So chains are drawn colder than the text, and
prompts are chosen (:func:`most_telling`) at which the negative control would show most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.decode import Decoding
from infer.drafters import Drafter
from infer.drafters.inside import inside_of
from infer.progress import progress
from infer.remembering import Remembering
from infer.stopping import Stop
from infer.verify import At, Chooser, RandomChooser, Rule, Verdict

POSITIONS = (1, 2)  # of the new tokens, the prefill's being 0: those of a round
LEAST_EXPECTED = 5.0

Context = tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How the law is sampled.

    Attributes:
        draws: first rounds behind each prompt.
        temperature, top_k, top_p: of the text; None does not filter. Drafts pass the same filters.
        draft_temperature: of drawn drafts.
        seed: of everything drawn.
    """

    draws: int = 1000
    temperature: float = 0.7
    top_k: int | None = None
    top_p: float | None = 0.9
    draft_temperature: float = 0.5
    seed: int = 0

    def processors(self) -> LogitsProcessorList:
        """The library's own, in the library's order."""
        warpers = [] if self.temperature == 1 else [TemperatureLogitsWarper(self.temperature)]
        top_k = [] if self.top_k is None else [TopKLogitsWarper(self.top_k)]
        top_p = [] if self.top_p is None or self.top_p >= 1 else [TopPLogitsWarper(self.top_p)]
        return LogitsProcessorList([*warpers, *top_k, *top_p])

    def sampler(self, generator: torch.Generator) -> Sampler:
        """Draws drafts."""
        return Sampler(self.draft_temperature, self.top_k, self.top_p, generator)


@dataclass
class Observed:
    """Counts of emitted tokens behind each context (tokens behind ``prompt``, (1, n)), and what became of drafts."""

    counts: dict[Context, Counter[int]] = field(default_factory=dict)
    accepted: int = 0
    rejected: int = 0
    prompt: Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.long))

    def add(self, tokens: Sequence[int]) -> None:
        """One draw's tokens, in order."""
        for at, token in enumerate(tokens[: POSITIONS[-1] + 1]):
            self.counts.setdefault(tuple(tokens[:at]), Counter())[token] += 1


@dataclass(frozen=True)
class ChiSquare:
    """A statistic beside its limit, df + 10·√(2·df); ``impossible`` counts tokens the target never says there."""

    statistic: float
    df: int
    draws: int
    impossible: int = 0

    @property
    def limit(self) -> float:
        """Ten standard deviations above the mean: no fair run is ever refused."""
        return self.df + 10 * (2 * self.df) ** 0.5

    @property
    def passed(self) -> bool:
        """Whether what was drawn may well be the target's."""
        return self.statistic <= self.limit and not self.impossible

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "statistic": self.statistic,
            "df": self.df,
            "limit": self.limit,
            "draws": self.draws,
            "impossible": self.impossible,
            "passed": self.passed,
        }


class FromBest(RandomChooser):
    """Random decisions, but for the first tokens of the text: the likeliest, so that all draws go on from them."""

    def __init__(self, generator: torch.Generator, count: int = 1) -> None:
        super().__init__(generator)
        self._left = count

    def sample(self, distribution: Tensor) -> int:
        """See :class:`infer.verify.Chooser`."""
        if self._left:
            self._left -= 1
            return int(distribution.argmax())
        return super().sample(distribution)


def residual_from_target(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """The negative control: the token rule, except that after a rejection it samples from p itself.

    A bug that real projects had. The law of its output is min(p, q) + (1 − α)·p, which the test must refuse.
    """
    path: list[int] = []
    node = -1
    while True:
        p = at.p(node)
        for child in draft.children(node):
            q = draft.full_q(child, p.shape[-1])
            if chooser.accept(min(1.0, float(p[draft.tokens[child]]) / float(q[draft.tokens[child]]))):
                break
        else:
            return Verdict(path, chooser.sample(p))
        path.append(child)
        node = child


def sample_rounds(
    target: Target,
    drafter: Drafter,
    prompt: Tensor,
    budget: Budget,
    sampling: Sampling,
    rule: Rule | None = None,
    *,
    draw: bool = True,
) -> Observed:
    """Draw first rounds behind ``prompt`` (1, n).

    Args:
        budget: how much a round may draft.
        rule: the acceptance rule; the decoder's own choice by default.
        draw: draw drafts; otherwise the likeliest are taken.
    """
    generator = torch.Generator(target.device).manual_seed(sampling.seed)
    once = Remembering(target)
    seen = Observed(prompt=prompt)
    for _ in progress(range(sampling.draws), sampling.draws, "sampling"):
        decoding = _first_round(once, drafter, prompt, budget, sampling, rule, generator, draw)
        before = prompt.shape[1] + len(decoding.stats.log) - 1
        seen.prompt = decoding.tokens.view()[:, :before].clone()
        seen.add(decoding.tokens.view()[0, before:].tolist())
        round_ = decoding.stats.log[-1]
        seen.accepted += round_.accepted
        seen.rejected += round_.accepted < round_.depth
    return seen


def _first_round(
    target: Target,
    drafter: Drafter,
    prompt: Tensor,
    budget: Budget,
    sampling: Sampling,
    rule: Rule | None,
    generator: torch.Generator,
    draw: bool = True,
) -> Decoding:
    """Decode the prompt's first token and one round; one without a draft before it, where there can be none."""
    plain = int(inside_of(drafter) is not None)
    decoding = Decoding(
        target,
        prompt.to(target.device),
        drafter,
        budget,
        Stop(prompt.shape[1] + budget.depth + 2 + plain),
        processors=sampling.processors(),
        do_sample=True,
        rule=rule,
        chooser=FromBest(generator, 1 + plain),
        sampler=sampling.sampler(generator) if draw else None,
    )
    rounds = decoding.run()
    for _ in range(2 + plain):
        next(rounds)
    return decoding


def most_telling(
    target: Target, drafter: Drafter, prompts: Sequence[Tensor], count: int, sampling: Sampling
) -> list[Tensor]:
    """The ``count`` prompts behind which :func:`residual_from_target` would show soonest.

    Its law at the first drafted token is min(p, q) + (1 − α)·p, so each draw adds Σ (α·p − min(p, q))² / p to the
    expected statistic.
    """

    def shows(prompt: Tensor) -> float:
        found = 0.0

        def look(draft: Draft, at: At, chooser: Chooser) -> Verdict:
            nonlocal found
            p = at.p(-1).double()
            if len(draft):
                both = torch.minimum(p, draft.full_q(0, p.shape[-1]).to(p))
                off = both.sum() * p - both
                found = float((off[p > 0] ** 2 / p[p > 0]).sum())
            return Verdict([], chooser.sample(p))

        generator = torch.Generator(target.device).manual_seed(sampling.seed)
        _first_round(target, drafter, prompt, Budget.chain(1), sampling, look, generator)
        return found

    return sorted(prompts, key=shows, reverse=True)[:count]


def expected_law(
    target: Target, prompt: Tensor, contexts: Sequence[Context], sampling: Sampling, batch: int = 16
) -> dict[Context, Tensor]:
    """The target's distribution (V,), float64, behind prompt and context, by plain passes without a cache."""
    law: dict[Context, Tensor] = {}
    prompt = prompt.to(target.device)
    for length in sorted({len(context) for context in contexts}):
        same = [context for context in contexts if len(context) == length]
        for at in range(0, len(same), batch):
            some = same[at : at + batch]
            answers = torch.tensor(some, dtype=prompt.dtype, device=prompt.device).view(len(some), length)
            ids = torch.cat([prompt.expand(len(some), -1), answers], 1)
            logits = target.forward(ids, logits_to_keep=1).logits[:, -1].float()
            scores: Tensor = sampling.processors()(cast(torch.LongTensor, ids), cast(torch.FloatTensor, logits))
            law |= zip(some, scores.double().softmax(-1), strict=True)
    return law


def compare(observed: Observed, law: dict[Context, Tensor], position: int) -> ChiSquare:
    """Chi-square of one position over all contexts of that length; bins expected under 5 times are merged."""
    statistic, df, draws, impossible = 0.0, 0, 0, 0
    for context, counts in observed.counts.items():
        if len(context) != position:
            continue
        n = counts.total()
        draws += n
        p = law[context]
        impossible += sum(count for token, count in counts.items() if float(p[token]) == 0)
        bins = _bins([(counts[token], n * float(p[token])) for token in p.nonzero().flatten().tolist()])
        if len(bins) > 1:
            statistic += sum((seen - due) ** 2 / due for seen, due in bins)
            df += len(bins) - 1
    return ChiSquare(statistic, df, draws, impossible)


def _bins(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Merge cells expected under 5 times into one, and that one into the smallest other if it is still too small."""
    kept = sorted((cell for cell in cells if cell[1] >= LEAST_EXPECTED), key=lambda cell: cell[1])
    small = [cell for cell in cells if cell[1] < LEAST_EXPECTED]
    rest = (sum(seen for seen, _ in small), sum(due for _, due in small))
    if not small:
        return kept
    if rest[1] >= LEAST_EXPECTED or not kept:
        return [*kept, rest]
    return [(kept[0][0] + rest[0], kept[0][1] + rest[1]), *kept[1:]]
