"""The decoding loop: draft → verify in one target pass → commit, until every text has ended.

prefill the prompts, emit each one's next token                                (the root)
repeat
    tell each drafter what was committed; let it propose a draft
    one target pass over [root, nodes…] of all texts; a row sees its text and its own ancestors, at position parent + 1
    the rule walks down each draft: accepted tokens, then one token of the target's own
    keep the keys and values of root and accepted nodes, forget the rest
    emit up to the first stop; texts that ended leave

Texts need not be equally long nor accept equally many tokens: each has its own length in the cache, prompts are
padded on the right while they are read, and shorter drafts are padded while they are verified. What is padding is
masked, and forgotten after the pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heads.forward import TargetOutput
from infer.cache import ForgettingCache
from infer.layout import Layout
from infer.metrics import Round
from infer.prefix import PrefixCache
from infer.recall import Recall

if TYPE_CHECKING:
    from infer.decode import Decoding


class Rounds:
    """Decodes texts of one target together.

    Args:
        texts: on the same target, their drafters reading the same taps.
        cache: the target's; a new one by default.
        fixed_rows: every pass after the prefill has exactly so many rows a text.
        prefix: where beginnings of these texts may be known from, and where they are left for others.
        within: entered around each pass after the prefill (``infer.stable`` exchanges the attention there).

    Raises:
        ValueError: no text, drafters that read different taps, or a target that ``prefix`` is not for.
    """

    def __init__(
        self,
        texts: Sequence[Decoding],
        *,
        cache: Any = None,
        fixed_rows: int | None = None,
        prefix: PrefixCache | None = None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if not texts:
            raise ValueError("there is no text to decode")
        self.texts, self.alive = list(texts), list(range(len(texts)))
        self.target, self.fixed_rows, self.within = texts[0].target, fixed_rows, within
        self.taps = tuple(texts[0].drafter.taps)
        if any(tuple(text.drafter.taps) != self.taps for text in texts):
            raise ValueError("texts decoded together need drafters that read the same taps")
        self.cache = ForgettingCache(self.target, len(texts)) if cache is None else cache
        self.recall = Recall(prefix, texts, self.taps)

    @torch.inference_mode()
    def run(self) -> Iterator[list[list[int]]]:
        """Decode; yields what each text emitted in the prefill and then in each round, [] for one that had ended.

        Raises:
            PositionLimit: the target has no position for the next token of a text (what was yielded stands).
        """
        yield self._prefill()
        for at, text in enumerate(self.texts):
            self.recall.remember(at, text, self.cache, at)
        self._leave()
        for at, text in enumerate(self.living):
            if getattr(text.drafter, "shares_cache", False):
                text.drafter.share(self.cache.row(at))  # type: ignore[attr-defined]
        while self.alive:
            yield self._round()
            self._leave()

    @property
    def living(self) -> list[Decoding]:
        """The texts that have not ended, in the cache's order."""
        return [self.texts[at] for at in self.alive]

    def _prefill(self) -> list[list[int]]:
        started = time.perf_counter()
        for text in self.texts:
            text.positions_left()
        lengths = [text.ids.shape[1] for text in self.texts]
        bases, known = self.recall.begin(self.texts, self.cache)
        new = [length - base for length, base in zip(lengths, bases, strict=True)]
        n = max(new)
        ids = self.texts[0].ids.new_zeros(len(new), n)
        for at, text in enumerate(self.texts):
            ids[at, : new[at]] = text.ids[0, bases[at] :]
        ends = sorted({count - 1 for count in new})
        keep = 1 if len(ends) == 1 else torch.tensor(ends)
        places = torch.arange(n).expand(len(new), n)
        # causality hides the padding on the right from all that stays
        if any(bases):
            mask = self._behind(bases, [torch.ones(n, n, dtype=torch.bool).tril()] * len(bases), n)
            places = torch.minimum(
                places, torch.tensor(new)[:, None] - 1
            )  # filler may not leave the positions there are
            out = self._forward(ids, torch.tensor(bases)[:, None] + places, mask, starts=bases, keep=keep)
        else:
            out = self._forward(ids, places, keep=keep)
        if len(set(lengths)) > 1 or len(ends) > 1:
            self.cache.keep(lengths, [[] for _ in lengths])
        emitted = []
        for at, text in enumerate(self.texts):
            end = ends.index(new[at] - 1)
            taps = None if out.taps is None else out.taps[at : at + 1, : new[at]]
            before = known[at]
            if before is not None and taps is not None:
                taps = torch.cat([before, taps], 1)
            self.recall.read(at, taps)
            emitted.append(text.read(out.logits[at, end : end + 1], taps))
        seconds = (time.perf_counter() - started) / len(self.texts)
        for text in self.texts:
            text.stats.prefill_seconds = seconds
        return emitted

    def _round(self) -> list[list[int]]:
        started = time.perf_counter()
        texts, share = self.living, 1 / len(self.alive)
        drafts, modules, drafting = [], [], []
        for text in texts:
            before, inside = time.perf_counter(), text.drafter.module_seconds
            drafts.append(text.propose(len(texts)))
            modules.append(text.drafter.module_seconds - inside)
            drafting.append(time.perf_counter() - before)
        drafted = time.perf_counter()
        bases = self.cache.lengths
        layout = Layout(drafts, [text.extra for text in texts], self.fixed_rows)
        with self.within():
            out = self._verify(texts, layout, bases)
        passed = time.perf_counter()

        emitted: list[list[int]] = [[] for _ in self.texts]
        paths = []
        for at, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            rows = 1 + len(draft)
            taps = None if out.taps is None else out.taps[at : at + 1, :rows]
            added = None if out.taps is None else out.taps[at : at + 1, layout.first :]
            path, emitted[self.alive[at]] = text.settle(draft, out.logits[at, :rows], taps, added)
            paths.append(path)
            self.recall.read(self.alive[at], None if taps is None else taps[:, [0, *(1 + node for node in path)]])
        self.cache.keep(bases, [[0, *(1 + node for node in path)] for path in paths])
        seconds = time.perf_counter() - started
        for at, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            new = len(emitted[self.alive[at]])
            done = Round(
                proposed=len(draft),
                rows=1 + len(draft) + len(text.extra),
                depth=max(draft.depths, default=0),
                accepted=min(len(paths[at]), new),
                emitted=new,
                seconds=seconds * share,
                target_seconds=(passed - drafted) * share,
                draft_seconds=modules[at],
                draft_total_seconds=drafting[at],
            )
            text.record(draft, paths[at], done)
        return emitted

    def _verify(self, texts: list[Decoding], layout: Layout, bases: list[int]) -> TargetOutput:
        """One pass over root and nodes of every text, and the rows that their drafters add."""
        n = layout.rows
        ids = layout.ids([text.tokens.last for text in texts])
        positions = torch.tensor(bases)[:, None] + layout.depths
        if self.target.max_positions is not None:
            positions = positions.clamp_max(self.target.max_positions - 1)  # filler may run out of them
        self.cache.expect(n)
        if n == 1 and self.cache.columns(1) == min(bases) + 1:  # nothing to hide
            return self._forward(ids, positions)
        mask = self._behind(bases, layout.seen, n)
        inside = next((text.inside for text in texts if len(text.extra)), None)
        if inside is None:
            return self._forward(ids, positions, mask, starts=bases)
        # a pass of fixed rows also makes all their logits: bits of a row may depend on how many there are
        keep = 0 if self.fixed_rows else torch.arange(layout.first)
        with inside.applied(self.target, layout.first, layout.slots().to(self.target.device)):
            return self._forward(ids, positions, mask, starts=bases, keep=keep)

    def _behind(self, bases: list[int], seen: list[Tensor], n: int) -> Tensor:
        """Bool (B, 1, n, columns): each text's cached positions and what its rows see of each other; filler itself."""
        mask = torch.zeros(len(bases), 1, n, self.cache.columns(n), dtype=torch.bool)
        for at, (base, own) in enumerate(zip(bases, seen, strict=True)):
            block = mask[at, 0, :, base : base + n]
            block.fill_diagonal_(True)
            block[: len(own), : len(own)] = own
            mask[at, 0, :, :base] = True
        return mask

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        *,
        starts: list[int] | None = None,
        keep: int | Tensor = 0,
    ) -> TargetOutput:
        device = self.target.device
        out = self.target.forward(
            ids.to(device),
            cache=self.cache,
            mask=None if mask is None else mask.to(device),
            positions=positions.to(device),
            starts=starts,
            taps=self.taps,
            logits_to_keep=keep.to(device) if isinstance(keep, Tensor) else keep,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next step waits for it anyway; here the clock sees it too
        return out

    def _leave(self) -> None:
        """Texts that ended free their place in the cache."""
        stay = [at for at, text in enumerate(self.living) if not text.done]
        for at, text in enumerate(self.living):
            if text.done:
                self.recall.remember(self.alive[at], text, self.cache, at)
        if len(stay) < len(self.alive) and stay:
            self.cache.select(stay)
        self.alive = [self.alive[at] for at in stay]
