"""The local engine as a ``Completer``: batched continuation with transformers' own ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


class LocalCompletion(NamedTuple):
    """Token ids up to the end-of-turn token (not included), and whether that token came."""

    ids: list[int]
    finished: bool


@dataclass
class LocalCompleter:
    """Continues prompts with a loaded target, ``batch_size`` at a time, the longest prompts together.

    Batches are formed by length so that little is padded; padding stands on the left, masked.
    """

    model: PreTrainedModel
    eos_ids: tuple[int, ...]
    batch_size: int = 64

    @torch.inference_mode()
    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[LocalCompletion]:
        """See ``data.completer.Completer.complete``; the generator's global state is restored afterwards."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        done: dict[int, LocalCompletion] = {}
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for at in range(0, len(order), self.batch_size):
                rows = order[at : at + self.batch_size]
                width = max(len(prompts[i]) for i in rows)
                ids = torch.full((len(rows), width), self.eos_ids[0])
                mask = torch.zeros_like(ids)
                for row, i in enumerate(rows):
                    ids[row, width - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
                    mask[row, width - len(prompts[i]) :] = 1
                out = self.model.generate(  # type: ignore[operator]  # the stubs take it for a tensor
                    ids.to(self.model.device),
                    attention_mask=mask.to(self.model.device),
                    max_new_tokens=max_new_tokens,
                    eos_token_id=list(self.eos_ids),
                    pad_token_id=self.eos_ids[0],
                    **sampling,
                )
                for row, i in enumerate(rows):
                    done[i] = self._cut(out[row, width:].tolist())
        return [done[i] for i in range(len(prompts))]

    def _cut(self, ids: list[int]) -> LocalCompletion:
        end = next((k for k, token in enumerate(ids) if token in self.eos_ids), None)
        return LocalCompletion(ids if end is None else ids[:end], end is not None)
