"""A stand-in for the serving engine: what :mod:`tests.serving.engine` calls of it, decoding as an engine does.

It drafts with the readers of :mod:`tests.heads.formats.engine`, which are written from the formats alone, and verifies
greedily with plain transformers. So the whole check runs in a second, on tiny models, and can be made to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.heads.formats.engine import Eagle3, medusa_vllm

__version__ = "0 (a stand-in)"
Drafting = Callable[[Tensor, int, int], list[int]]


def _eagle3(folder: Path, model: Any) -> Drafting:
    reader = Eagle3(folder, model, "vllm")

    def draft(text: Tensor, root: int, depth: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < depth:
            tokens.append(int(reader.draft(text, root, tokens)[-1].argmax()))
        return tokens

    return draft


def _medusa(folder: Path, model: Any) -> Drafting:
    def draft(text: Tensor, root: int, depth: int) -> list[int]:
        last = model.model(text[None]).last_hidden_state[0, -1]
        return [int(logits.argmax()) for logits in medusa_vllm(folder, model, last)[:depth]]

    return draft


METHODS: dict[str, Callable[[Path, Any], Drafting]] = {"eagle3": _eagle3, "medusa": _medusa}


class SamplingParams:
    """Greedy, so long."""

    def __init__(self, temperature: float, max_tokens: int) -> None:
        assert temperature == 0
        self.max_tokens = max_tokens


class LLM:
    """A model of transformers and perhaps exported heads; what was drafted and accepted is counted by position."""

    def __init__(self, model: str, dtype: str, speculative_config: dict[str, Any] | None, **_: Any) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.ends = self.model.generation_config.eos_token_id
        self.depth, self.rounds = 0, 0
        self.waiting: list[tuple[str, Iterator[list[int]]]] = []
        self.draft: Drafting = lambda text, root, depth: []
        self.accepted: list[int] = []
        if speculative_config is not None:
            self.depth = speculative_config["num_speculative_tokens"]
            self.draft = METHODS[speculative_config["method"]](Path(speculative_config["model"]), self.model)
            self.accepted = [0] * self.depth

    @property
    def llm_engine(self) -> LLM:
        """It is its own inner engine."""
        return self

    def add_request(self, number: str, prompt: dict[str, list[int]], asked: SamplingParams) -> None:
        """To be answered by the steps that follow."""
        self.waiting.append((number, self._answer(torch.tensor(prompt["prompt_token_ids"]), asked.max_tokens)))

    def has_unfinished_requests(self) -> bool:
        """Whether another step has something to do."""
        return bool(self.waiting)

    def step(self) -> list[SimpleNamespace]:
        """All waiting texts one round further, in the engine's own shape: what is known of each so far."""
        said = [(number, next(text, None), text) for number, text in self.waiting]
        self.waiting = [(number, text) for number, tokens, text in said if tokens is not None]
        return [
            SimpleNamespace(request_id=number, outputs=[SimpleNamespace(token_ids=tokens)])
            for number, tokens, _ in said
            if tokens is not None
        ]

    @torch.no_grad()
    def _answer(self, prompt: Tensor, most: int) -> Iterator[list[int]]:
        said = [int(self.model(prompt[None]).logits[0, -1].argmax())]
        yield said[:]
        while len(said) < most and said[-1] != self.ends:
            text = torch.cat([prompt, torch.tensor(said[:-1], dtype=prompt.dtype)])
            drafted = self.draft(text, said[-1], self.depth)
            read = torch.cat([text, torch.tensor([said[-1], *drafted])])
            wanted = self.model(read[None]).logits[0, len(text) :].argmax(-1).tolist()
            right = next((i for i, token in enumerate(drafted) if token != wanted[i]), len(drafted))
            said += wanted[: right + 1]
            if drafted:
                self.rounds += 1
                self.accepted = [count + (right > i) for i, count in enumerate(self.accepted)]
            if self.ends in said:
                said = said[: said.index(self.ends) + 1]
            yield said[:most]

    def get_metrics(self) -> list[SimpleNamespace]:
        """Its counters, under the engine's names."""
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.rounds),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=self.accepted),
            SimpleNamespace(name="vllm:prompt_tokens", value=0),
        ]
