"""Stand-ins: drafters whose quality is known, a target that is a table, and choosers that take every branch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from heads import Target, TargetOutput
from heads.draft import Draft
from heads.grow import Budget, Sampler
from infer import verify
from infer.verify import Chooser


class FakeDrafter:
    """Follows the text and checks what the loop hands over; subclasses draft."""

    lookahead = 4
    module_seconds = 0.0

    def __init__(self, taps: tuple[int, ...] = (1, 2)) -> None:
        self.taps = taps
        self.text: list[int] = []
        self.rounds = 0

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        self.text = ids[0].tolist()
        self._check(taps, len(self.text) - 1)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        self.text += ids
        self._check(taps, len(ids))

    def _check(self, taps: Tensor | None, rows: int) -> None:
        if self.taps:
            assert taps is not None and taps.shape[:2] == (1, rows), "taps of exactly the committed rows"
        else:
            assert taps is None

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        self.rounds += 1
        return self.draft(budget, sampler)

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        raise NotImplementedError

    def fork(self) -> Self:
        other = copy.copy(self)
        other.text, other.rounds = [], 0
        return other


class Oracle(FakeDrafter):
    """Knows the target's greedy text and drafts it as a chain."""

    def __init__(self, text: Sequence[int], taps: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(taps)
        self.answer = list(text)

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        return Draft.chain(self.answer[len(self.text) :][: budget.depth])


class Wrong(Oracle):
    """Knows the text and avoids it, at every place."""

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        right = self.answer[len(self.text) :][: budget.depth]
        return Draft.chain([(token + 1) % 64 for token in right])


class RandomTree(Oracle):
    """A random tree in which some paths are the right ones; siblings in random order."""

    def __init__(self, text: Sequence[int], seed: int = 0, skill: float = 0.6, vocab: int = 64) -> None:
        super().__init__(text)
        self.random = torch.Generator().manual_seed(seed)
        self.skill, self.vocab = skill, vocab

    def fork(self) -> Self:
        other = super().fork()
        other.random = torch.Generator()
        other.random.set_state(self.random.get_state())
        return other

    def _int(self, bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=self.random))

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        on_path: list[bool] = []
        for _ in range(budget.rows - 1):
            parent = self._int(len(tokens) + 1) - 1
            depth = 1 if parent < 0 else depths[parent] + 1
            if depth > budget.depth:
                continue
            right = self.answer[len(self.text) + depth - 1] if len(self.text) + depth - 1 < len(self.answer) else 0
            known = (parent < 0 or on_path[parent]) and self._int(100) < 100 * self.skill
            token = right if known else self._int(self.vocab)
            if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            on_path.append(token == right and (parent < 0 or on_path[parent]))
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))


class Broken(RandomTree):
    """Trees whose scores are all NaN, as heads with ruined weights give them."""

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        draft = super().draft(budget, sampler)
        return Draft(draft.tokens, draft.parents, draft.q, None, (float("nan"),) * len(draft))


class Sampled(FakeDrafter):
    """Draws a chain from a table of its own, ``q_after(prefix) -> (Vd,)``, through a chooser or torch."""

    def __init__(
        self,
        q_after: Callable[[tuple[int, ...]], Tensor],
        chooser: Chooser,
        ids: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        super().__init__(taps)
        self.q_after, self.chooser, self.ids = q_after, chooser, ids

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        tokens: list[int] = []
        qs: list[Tensor] = []
        for _ in range(budget.depth):
            q = self.q_after((*self.text, *tokens)).float()
            place = self.chooser.sample(q)
            tokens.append(place if self.ids is None else int(self.ids[place]))
            qs.append(q)
        return Draft.chain(tokens, qs, self.ids)


class Chosen(FakeDrafter):
    """The same tree every round: ``shape`` of rank paths over fixed tokens by depth."""

    def __init__(self, tree: Draft) -> None:
        super().__init__(())
        self.tree = tree

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        return self.tree


class TableModel:
    """Just enough of a model for the cache to be built: one layer of full attention."""

    def __init__(self) -> None:
        from transformers import LlamaConfig

        self.config = LlamaConfig(num_hidden_layers=1)


class TableTarget:
    """A target whose next-token law is a function of the prefix it *sees*.

    The prefix of each row is read through the mask from the ids in the cache, ordered by position, so a wrong mask,
    position or compaction changes the law.
    """

    dtype = torch.float64
    device = torch.device("cpu")
    max_positions = None
    rotary_border = None
    name = "table"
    layer_types = ("full_attention",)

    def __init__(self, logits_after: Callable[[tuple[int, ...]], Tensor], vocab: int) -> None:
        self.logits_after, self.vocab_size = logits_after, vocab
        self.model = TableModel()
        self.passes = 0

    def forward(
        self,
        ids: Tensor,
        *,
        cache: Any,
        mask: Tensor | None = None,
        positions: Tensor,
        starts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        self.passes += 1
        n = ids.shape[1]
        both = torch.stack([ids[0], positions[0]], -1).double()[None, None]
        kept, _ = cache.update(both, both, 0)
        length = kept.shape[2]
        if mask is None:
            mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)[None, None]
        rows = []
        for row in range(n):
            seen = kept[0, 0][mask[0, 0, row]]
            token, place = seen.long().unbind(-1)
            assert place.tolist() == list(range(len(place))), "a row sees one token at each position, in order"
            rows.append(self.logits_after(tuple(token.tolist())))
        logits = torch.stack(rows)[None]
        return TargetOutput(logits[:, -logits_to_keep:] if logits_to_keep else logits, None, None)


def table(vocab: int, seed: int, scale: float = 1.5) -> Callable[[tuple[int, ...]], Tensor]:
    """Random float64 logits (vocab,) for every prefix, remembered."""
    made: dict[tuple[int, ...], Tensor] = {}

    def after(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in made:
            mix = hash((seed, prefix)) % (2**31)
            made[prefix] = torch.randn(vocab, generator=torch.Generator().manual_seed(mix), dtype=torch.float64) * scale
        return made[prefix]

    return after


class Branching:
    """A chooser that follows a script of answers, then takes first options, and knows its branch's probability."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.taken, self.options = script, [], []  # type: ignore[var-annotated]
        self.weight = 1.0

    def _choose(self, weights: list[tuple[int, float]]) -> int:
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else 0
        self.taken.append(choice)
        self.options.append(len(weights))
        answer, weight = weights[choice]
        self.weight *= weight
        return answer

    def accept(self, probability: float) -> bool:
        weights = [(1, probability), (0, 1 - probability)]
        return bool(self._choose([w for w in weights if w[1] > 0]))

    def sample(self, distribution: Tensor) -> int:
        weights = (distribution.double() / distribution.double().sum()).tolist()
        return self._choose([(i, w) for i, w in enumerate(weights) if w > 0])


def enumerate_law(
    run: Callable[[Branching], Hashable], chooser_of: Callable[[Sequence[int]], Branching] = Branching
) -> dict[Any, float]:
    """Exact law of what ``run`` returns, over every branch its chooser can take."""
    law: dict[Any, float] = defaultdict(float)
    todo: list[tuple[int, ...]] = [()]
    while todo:
        script = todo.pop()
        chooser = chooser_of(script)
        law[run(chooser)] += chooser.weight
        for at in range(len(script), len(chooser.taken)):
            todo += [(*chooser.taken[:at], other) for other in range(1, chooser.options[at])]
    return dict(law)


# planted bugs


def zero_only_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant "wrong residual": p without the drafted token, though it was drawn."""
    asked: list[int] = []
    real = verify.drawn_from

    def remember(draft: Draft, node: int, like: Tensor) -> Tensor:
        asked.append(draft.tokens[node])
        return real(draft, node, like)

    def residual(p: Tensor, q: Tensor) -> tuple[Tensor, float]:
        left = p.clone()
        left[asked[-1]] = 0
        return left / left.sum(), float(left.sum())

    monkeypatch.setattr(verify, "drawn_from", remember)
    monkeypatch.setattr(verify, "residual", residual)


class OneNumber:
    """Mutant "reused random numbers": drafting, acceptance and residual read the same uniform number."""

    def __init__(self, u: float) -> None:
        self.u = u

    def accept(self, probability: float) -> bool:
        return self.u < probability

    def sample(self, distribution: Tensor) -> int:
        return int((distribution.cumsum(0) / distribution.sum() <= self.u).sum().clamp(max=len(distribution) - 1))
