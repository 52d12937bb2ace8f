"""Every family × drafter × attention × precision says what ``model.generate`` says, token by token.

One loop counts all cases and fails on any that is left out. In float64 nothing may differ. In float32 a pass over
several rows rounds differently from passes over one, so a near-tie may go the other way: each such case is listed,
with the gap between the two tokens, which may be no more than ``NEAR``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.seq2seq_model import Seq2SeqDrafter
from tests.infer.fakes import Oracle, RandomTree, Wrong
from tests.tiny import FAMILIES, SEQ2SEQ, tiny_model, tiny_seq2seq

NEW = 10
NEAR = 1e-4
PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 7, 3, 44]])
CHAIN = Budget.chain(4)
TREE = Budget(rows=12, depth=4, width=3)

# rows of the matrix beside the plain families: family and what its configuration says differently
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral sliding": ("mistral", {"sliding_window": 6}),
    "phi3 sliding": ("phi3", {"sliding_window": 6}),
    "gemma2 narrow": ("gemma2", {"sliding_window": 6}),
    "gemma3 narrow": ("gemma3", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama padded vocabulary": ("llama", {"vocab": 72}),  # eight ids more than the drafters and the prompt know
    "falcon multi-query": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in FAMILIES} | VARIANTS


@cache
def small(vocab: int, dtype: torch.dtype) -> Any:
    return tiny_model("llama", layers=1, seed=1, vocab=vocab, dtype=dtype)


@cache
def smaller(family: str, dtype: torch.dtype) -> Any:
    return tiny_seq2seq(family, layers=1, encoder=1, seed=3, dtype=dtype)


Make = Callable[[Any, list[int]], Any]
DRAFTERS: dict[str, tuple[Budget, Make]] = {
    "none": (CHAIN, lambda model, text: "none"),
    "oracle chain": (CHAIN, lambda model, text: Oracle(text, ())),
    "random chain": (CHAIN, lambda model, text: RandomChain(text)),
    "wrong chain": (CHAIN, lambda model, text: Wrong(text, ())),
    "random tree": (TREE, lambda model, text: tapped(RandomTree(text))),
    "lookup": (CHAIN, lambda model, text: "lookup:1"),
    "lookup tree": (TREE, lambda model, text: "lookup:1"),
    "layers": (CHAIN, lambda model, text: "layers:0"),
    "model": (CHAIN, lambda model, text: DraftModelDrafter(small(model.config.vocab_size, model.dtype))),
    "model tree": (TREE, lambda model, text: DraftModelDrafter(small(model.config.vocab_size, model.dtype))),
    "hybrid": (CHAIN, lambda model, text: "lookup:2+layers:0"),
}
SEQ2SEQ_DRAFTERS: dict[str, Make] = {
    "none": lambda model, text: "none",
    "oracle": lambda model, text: Oracle(text, ()),
    "random": lambda model, text: RandomChain(text),
    "wrong": lambda model, text: Wrong(text, ()),
    "lookup": lambda model, text: "lookup:1",
    "itself": lambda model, text: Seq2SeqDrafter(model),
    "smaller": lambda model, text: Seq2SeqDrafter(smaller(model.config.model_type, model.dtype)),
}
ATTENTIONS = ("eager", "sdpa")
EAGER_ONLY = {"gemma2"}  # transformers has no sdpa for it: soft-capped scores are not what that kernel computes
DTYPES = (torch.float64, torch.float32)


class RandomChain(Oracle):
    """Some tokens are right, some are not."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(text, ())
        self.random = torch.Generator().manual_seed(0)

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        right = super().draft(budget, sampler).tokens
        wrong = torch.rand(len(right), generator=self.random) < 0.3
        return Draft.chain([(token + int(off)) % 64 for token, off in zip(right, wrong, strict=True)])


def attentions(family: str) -> Sequence[str]:
    return ATTENTIONS[:1] if family in EAGER_ONLY else ATTENTIONS


def tapped(drafter: Any) -> Any:
    """The same drafter reading hidden states from all over the model."""
    drafter.taps = (0, 1, 2)
    return drafter


@dataclass(frozen=True)
class Plain:
    """What ``model.generate`` says, its logits (new, V) at each place, and whether nothing may differ."""

    text: list[int]
    logits: Tensor
    exact: bool

    @classmethod
    def of(cls, model: Any, new: int) -> Plain:
        settings: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
        out = model.generate(PROMPT, max_new_tokens=new, do_sample=False, **settings)
        return cls(out.sequences[0].tolist(), torch.cat(out.logits), model.dtype == torch.float64)


@dataclass
class Tally:
    """Cases decoded, and the near-ties among them."""

    cases: int = 0
    near: list[str] = field(default_factory=list)

    def compare(self, name: str, ours: list[int], plain: Plain) -> None:
        """Count a case."""
        self.cases += 1
        assert len(ours) == len(plain.text), name
        at = next((at for at, pair in enumerate(zip(ours, plain.text, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            return
        assert not plain.exact, f"{name}: token {at} differs in float64"
        logits = plain.logits[at - len(plain.text)]
        gap = float((logits[ours[at]] - logits[plain.text[at]]).abs())
        assert gap <= NEAR, f"{name}: token {at} differs by {gap}"
        self.near.append(f"{name}: token {at}, gap {gap:.1e}")

    def show(self, name: str) -> None:
        print(f"{name}: {self.cases} cases", *self.near, sep="\n  near-tie ")


@pytest.mark.parametrize("row", ROWS)
def test_a_family_with_every_drafter(row: str) -> None:
    family, settings = ROWS[row]
    tally = Tally()
    for dtype in DTYPES:
        for attention in attentions(family):
            model = tiny_model(family, layers=2, dtype=dtype, attention=attention, **settings)
            assert model.config._attn_implementation == attention
            plain = Plain.of(model, NEW)
            for name, (budget, make) in DRAFTERS.items():
                draft = make(model, plain.text)
                out = infer.generate(model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=budget)
                tally.compare(f"{row}, {name}, {attention}, {dtype}", out.sequences[0].tolist(), plain)
    tally.show(row)
    assert tally.cases == len(DRAFTERS) * len(attentions(family)) * len(DTYPES)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_an_encoder_decoder_with_every_drafter(family: str) -> None:
    tally = Tally()
    for dtype in DTYPES:
        for attention in ATTENTIONS:
            model = tiny_seq2seq(family, dtype=dtype, attention=attention)
            assert model.config._attn_implementation == attention
            plain = Plain.of(model, 2 * NEW)
            for name, make in SEQ2SEQ_DRAFTERS.items():
                draft = make(model, plain.text)
                out = infer.generate(model, PROMPT, draft, max_new_tokens=2 * NEW, do_sample=False)
                tally.compare(f"{family}, {name}, {attention}, {dtype}", out.sequences[0].tolist(), plain)
    tally.show(family)
    assert tally.cases == len(SEQ2SEQ_DRAFTERS) * len(ATTENTIONS) * len(DTYPES)


@pytest.mark.parametrize("family", sorted(EAGER_ONLY))
def test_what_has_one_attention_only_has_no_other(family: str) -> None:
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        tiny_model(family, attention="sdpa")


def test_the_matrix_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Every family there is has its row, and the count is the product."""
    assert set(FAMILIES) <= set(ROWS)
    decoders = sum(len(DRAFTERS) * len(attentions(family)) for family, _ in ROWS.values())
    seq2seq = len(SEQ2SEQ) * len(SEQ2SEQ_DRAFTERS) * len(ATTENTIONS)
    count = (decoders + seq2seq) * len(DTYPES)
    with capsys.disabled():
        print(
            f"\nmatrix: {len(ROWS)} decoders × {len(DRAFTERS)} drafters and {len(SEQ2SEQ)} encoder-decoders × "
            f"{len(SEQ2SEQ_DRAFTERS)}, in {' and '.join(ATTENTIONS)}, float64 and float32: {count} cases, none left out"
        )
    assert count > 900
