"""What an encoder-decoder target does not go together with is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.kinds import make_config
from heads.target import Target
from infer.drafters.early_layers import EarlyLayersDrafter
from infer.drafters.seq2seq_model import Seq2SeqDrafter
from infer.seq2seq import Seq2SeqTarget
from tests.infer.fakes import RandomTree
from tests.infer.test_seq2seq import PROMPT, decoded, greedy, model_of
from tests.tiny import SEQ2SEQ, tiny_model, tiny_seq2seq


def test_heads_and_own_layers_are_refused_by_name() -> None:
    model = model_of("t5")
    with pytest.raises(ValueError, match="encoder-decoder, for which heads are not supported"):
        Target(model)
    target = Seq2SeqTarget(model)
    with pytest.raises(ValueError, match="heads are not supported"):
        make_config("medusa", target, lookahead=3)
    with pytest.raises(ValueError, match="its own layers is not supported"):
        decoded(model, "layers:0")
    with pytest.raises(ValueError, match="its own layers is not supported"):
        EarlyLayersDrafter(target, [0])
    with pytest.raises(ValueError, match="no encoder-decoder"):
        Seq2SeqTarget(tiny_model("llama"))
    with pytest.raises(ValueError, match="no encoder-decoder"):
        Seq2SeqDrafter(Target(tiny_model("llama")))


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_trees_are_refused(family: str) -> None:
    model = model_of(family)
    text = greedy(model)[0].tolist()
    with pytest.raises(ValueError, match="chains only"):
        decoded(model, "lookup", budget=Budget(rows=8, depth=3, width=2))

    class Trees(RandomTree):
        def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
            return super().draft(Budget(rows=9, depth=3, width=3), sampler)

    trees = Trees(text)
    trees.taps = ()
    with pytest.raises(ValueError, match="whose drafts are chains: this one is a tree"):
        decoded(model, trees)


def test_other_things_that_do_not_go_together_are_refused() -> None:
    model = model_of("t5")
    wrong: dict[str, dict[str, Any]] = {
        "prefix_cache": {"prefix_cache": infer.PrefixCache()},
        "stable": {"stable": True},
        "static cache": {"cache_implementation": "static"},
        "decoder_input_ids": {"decoder_input_ids": PROMPT},
        "num_beams": {"num_beams": 2},
    }
    for what, settings in wrong.items():
        with pytest.raises(ValueError, match=what):
            decoded(model, "none", **settings)
    with pytest.raises(ValueError, match="vocabularies"):
        decoded(model, Seq2SeqDrafter(tiny_seq2seq("t5", vocab=50)))
    with pytest.raises(ValueError, match="drafts for encoder-decoders only"):
        infer.generate(tiny_model("llama"), PROMPT, Seq2SeqDrafter(model), max_new_tokens=4)
    with pytest.raises(ValueError, match="decoder-only"):
        model.generate(PROMPT, custom_generate=infer.custom_generate("none"), max_new_tokens=4)
