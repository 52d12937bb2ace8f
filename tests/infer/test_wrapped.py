"""Targets that are more than a plain model: adapted, quantized, tied, with a vocabulary wider than the tokenizer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from transformers import PreTrainedTokenizerFast

import infer
from heads.grow import Budget
from heads.kinds import make_config
from heads.target import Target
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.seq2seq_model import Seq2SeqDrafter
from tests.infer.fakes import Oracle, RandomTree
from tests.tiny import FAMILIES, tiny_model, tiny_seq2seq

NEW = 20
PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60, 7, 3, 44]])
TREE = Budget(rows=12, depth=4, width=3)
CHAIN = Budget.chain(4)


def greedy(model: Any, **settings: Any) -> list[int]:
    with torch.no_grad():
        return model.generate(input_ids=PROMPT, max_new_tokens=NEW, do_sample=False, **settings)[0].tolist()


def exact(model: Any, text: list[int], **settings: Any) -> None:
    """Whoever drafts, chains and trees, the model itself with it."""
    base = tiny_model("llama", dtype=next(model.parameters()).dtype, layers=1, vocab=Target(model).vocab_size)
    drafts: list[tuple[Any, Budget]] = [
        ("none", CHAIN),
        (Oracle(text), CHAIN),
        (RandomTree(text), TREE),
        ("lookup:1", TREE),
        ("layers:0", CHAIN),
        (DraftModelDrafter(model), CHAIN),
        (DraftModelDrafter(base), TREE),
    ]
    for draft, budget in drafts:
        settings |= {"max_new_tokens": NEW, "do_sample": False}
        out = infer.generate(model, PROMPT, draft, budget=budget, **settings)
        assert out.sequences[0].tolist() == text, draft


# adapters

TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gptneox": ["query_key_value"],
    "falcon": ["query_key_value"],
    "qwen3moe": ["q_proj", "o_proj"],
}


def adapted(model: Any, modules: list[str]) -> Any:
    """A LoRA whose B is random, not zero."""
    config = LoraConfig(target_modules=modules, r=4, init_lora_weights=False, lora_dropout=0.5)
    return get_peft_model(model, config).double()


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_are_on_in_draft_and_verification(family: str) -> None:
    plain = greedy(tiny_model(family, layers=2))
    model = adapted(tiny_model(family, layers=2), TARGETS[family]).eval()
    text = greedy(model)
    assert text != plain
    exact(model, text)
    with model.disable_adapter():
        assert greedy(model) == plain
        assert (
            infer.generate(model, PROMPT, "lookup:1", max_new_tokens=NEW, do_sample=False).sequences[0].tolist()
            == plain
        )
    own = infer.generate(model, PROMPT, DraftModelDrafter(model), max_new_tokens=NEW, do_sample=False)
    assert all(r.accepted == r.proposed for r in own.stats.log), "as a draft model it says what it says as a target"


def test_an_adapted_encoder_decoder() -> None:
    base = tiny_seq2seq("t5")
    plain = greedy(base)
    model = adapted(base, ["q", "v", "wo"]).eval()
    text = greedy(model)
    assert text != plain
    for draft in ("none", Oracle(text, ()), Seq2SeqDrafter(model)):
        out = infer.generate(model, PROMPT, draft, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0].tolist() == text


# quantized weights


class Int8Linear(nn.Module):
    """Weights in int8 with a scale a row, as weight-only quantizers keep them."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (plain.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)  # type: ignore[operator]


def quantized(model: Any) -> Any:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_weights_in_int8(attention: str) -> None:
    """Masks and logits keep the dtype passes run in, not the one weights are stored in."""
    plain = greedy(tiny_model("llama", layers=2, attention=attention))
    model = quantized(tiny_model("llama", layers=2, attention=attention))
    text = greedy(model)
    assert text != plain
    assert Target(model).dtype == torch.float64 and Target(model).vocab_size == 64
    exact(model, text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_that_pytorch_keeps_in_float16() -> None:
    model = quantize_dynamic(tiny_model("llama", layers=2, dtype=torch.float32), {nn.Linear}, dtype=torch.float16)
    exact(model, greedy(model))
    with pytest.raises(ValueError, match="heads cannot tell it"):
        make_config("medusa", Target(model), lookahead=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_activations_scaled_over_the_whole_pass_are_refused() -> None:
    """A row's result then depends on the rows beside it, by far more than rounding."""
    model = quantize_dynamic(tiny_model("llama", layers=2, dtype=torch.float32), {nn.Linear})
    with torch.no_grad():
        together, alone = model(PROMPT).logits[0, 2], model(PROMPT[:, :3]).logits[0, 2]
    assert (together - alone).abs().max() > 1e-2 * alone.abs().max()
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj of LlamaForCausalLM is quantized"):
        infer.generate(model, PROMPT, "lookup", max_new_tokens=NEW)


# tied and untied


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gptneox", "falcon")])
def test_tied_matrices(family: str) -> None:
    model = tiny_model(family, layers=2, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    text = greedy(model)
    for draft, budget in ((Oracle(text), CHAIN), (RandomTree(text), TREE), ("layers:0", CHAIN)):
        out = infer.generate(model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=budget)
        assert out.sequences[0].tolist() == text


# a vocabulary padded beyond the tokenizer's


def tokenizer(size: int) -> Any:
    made = Tokenizer(models.WordLevel({f"w{at}": at for at in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_ids_beyond_the_tokenizer_decode_to_nothing() -> None:
    """64 ids of which the tokenizer knows 60; 62 is forced, counted, and shown as nothing."""
    model, words = tiny_model("llama", layers=2), tokenizer(60)
    bias = {(62,): 100.0}
    ids = words("w7 w3 w44 w12 w9 w30 w21", return_tensors="pt").input_ids
    text = model.generate(ids, max_new_tokens=6, do_sample=False, sequence_bias=bias)
    assert text[0, 7:].tolist() == [62] * 6
    pieces: list[str] = []
    for draft in ("none", Oracle(text[0].tolist()), "lookup:1"):
        out = infer.generate(
            model,
            "w7 w3 w44 w12 w9 w30 w21",
            draft,
            tokenizer=words,
            max_new_tokens=6,
            do_sample=False,
            sequence_bias=bias,
            stream=pieces.append,
        )
        assert torch.equal(out.sequences, text) and out.stats.tokens == 6
        assert out.texts is not None and out.texts[0].strip() == ""
    assert "".join(pieces).strip() == ""


@pytest.mark.parametrize("padded", [56, 72])
def test_a_draft_model_whose_matrix_is_padded_otherwise(padded: int, tmp_path: Path) -> None:
    """Both know the same 50 tokens; what lies beyond is padding of their own."""
    words = tokenizer(50)
    target, small = tiny_model("llama", layers=2), tiny_model("llama", layers=1, vocab=padded, seed=1)
    for model, folder in ((target, "target"), (small, "small")):
        model.save_pretrained(tmp_path / folder)
        words.save_pretrained(tmp_path / folder)
    loaded = Target.load(str(tmp_path / "target"), dtype=torch.float64)
    text = greedy(loaded.model)
    for budget in (CHAIN, TREE):
        draft = f"model:{tmp_path / 'small'}"
        out = infer.generate(loaded, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=budget)
        assert out.sequences[0].tolist() == text
