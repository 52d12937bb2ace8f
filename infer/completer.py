"""The local engine as a ``Completer``: batched, by transformers' own ``generate`` or with a draft by ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.inside import DraftsInside
from infer.generate import generate


class LocalCompletion(NamedTuple):
    """Token ids up to the end-of-turn token (not included), and whether that token came."""

    ids: list[int]
    finished: bool


@dataclass
class LocalCompleter:
    """Continues prompts with a loaded target, ``batch_size`` at a time, the longest prompts together.

    Batches are formed by length so that little is padded; padding stands on the left, masked.

    Attributes:
        eos_ids: tokens that end a continuation.
        draft: heads, or what else ``infer.generate`` drafts with. Greedy continuations are the same with it and
            without, in fewer passes, drafted as far as pays at this batch size; sampled ones are other draws of the
            same law, drafted to the draft's own length.
    """

    model: PreTrainedModel
    eos_ids: tuple[int, ...]
    batch_size: int = 64
    draft: Any = None

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
                out = self._continued(ids, mask, max_new_tokens=max_new_tokens, **sampling)
                for row, i in enumerate(rows):
                    done[i] = self._cut(out[row, width:].tolist())
        return [done[i] for i in range(len(prompts))]

    def _continued(self, ids: Tensor, mask: Tensor, **settings: Any) -> Tensor:
        """(B, n+new) continuations of prompts (B, n)."""
        settings |= {"eos_token_id": list(self.eos_ids), "pad_token_id": self.eos_ids[0]}
        ids, settings["attention_mask"] = ids.to(self.model.device), mask.to(self.model.device)
        if self.draft is not None:
            # what is drawn would hang on how far each draft went, and the same seed give other texts
            control = "fixed" if settings["do_sample"] or isinstance(self.draft, DraftsInside) else "auto"
            return generate(self.model, ids, self.draft, control=control, **settings).sequences
        made: Tensor = self.model.generate(ids, **settings)  # type: ignore[operator]  # the stubs take it for a tensor
        return made

    def _cut(self, ids: list[int]) -> LocalCompletion:
        end = next((k for k, token in enumerate(ids) if token in self.eos_ids), None)
        return LocalCompletion(ids if end is None else ids[:end], end is not None)
