"""What a call of ``generate`` returns, put together from the texts it decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from infer.metrics import Stats, mark_loops
from infer.stream import decode

if TYPE_CHECKING:
    from infer.decode import Decoding


@dataclass
class Generation:
    """What came of one call.

    Attributes:
        sequences: (B, n) prompts and new tokens, as ``model.generate`` returns them: shorter answers are padded on
            the right, shorter prompts on the left.
        texts: the new text of each, special tokens skipped; None where no tokenizer is known.
        stats: rounds, acceptance and times, over all texts.
        row_stats: the same for each text.
        scores: with ``output_scores``, the processed scores (B, V) at each new place; 0 for a text that had ended.
        logits: with ``output_logits``, the target's raw logits (B, V) likewise.
    """

    sequences: Tensor
    texts: list[str] | None
    stats: Stats
    row_stats: list[Stats] = field(default_factory=list)
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None


def assemble(
    texts: Sequence[Decoding], prompts: Sequence[Tensor], config: GenerationConfig, tokenizer: Any
) -> Generation:
    """The result of decoded texts.

    Args:
        texts: finished.
        prompts: (1, n) each, as they are to be returned.
        config: of the call.
        tokenizer: None where there is none.
    """
    pad = _padding(config, tokenizer)
    new = [t.tokens.view()[0, len(t.tokens) - t.stats.tokens :] for t in texts]
    rows = [(prompt[0], tail) for prompt, tail in zip(prompts, new, strict=True)]
    longest, most = max(len(prompt) for prompt, _ in rows), max(len(tail) for _, tail in rows)
    sequences = prompts[0].new_full((len(rows), longest + most), pad)
    for at, (prompt, tail) in enumerate(rows):
        sequences[at, longest - len(prompt) : longest] = prompt
        sequences[at, longest : longest + len(tail)] = tail
    for text, tail in zip(texts, new, strict=True):
        mark_loops(text.stats.log, tail.tolist())
    stats = [text.stats for text in texts]
    return Generation(
        sequences=sequences,
        texts=None if tokenizer is None else [decode(tokenizer, tail.tolist()) for tail in new],
        stats=stats[0] if len(stats) == 1 else Stats.pooled(stats),
        row_stats=stats,
        scores=_stacked([text.scores for text in texts]) if config.output_scores else None,
        logits=_stacked([text.logits for text in texts]) if config.output_logits else None,
    )


def _padding(config: GenerationConfig, tokenizer: Any) -> int:
    """The id behind a text that ended before others: as transformers, the padding token or else the first end."""
    ends = config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    for pad in (config.pad_token_id, end, getattr(tokenizer, "pad_token_id", None)):
        if pad is not None:
            return int(pad)
    return 0


def _stacked(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """(V,) tensors of each text → (B, V) of each place."""
    longest = max(map(len, rows))
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[at] if at < len(row) else blank for row in rows]) for at in range(longest))
