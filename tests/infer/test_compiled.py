"""Static caches and compiled passes: the text of ``model.generate``, from one place in memory and one compilation."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import infer
from heads.grow import Budget
from heads.target import Target
from infer import compiled
from infer.static import StaticCache
from tests.infer.fakes import Oracle, RandomTree
from tests.tiny import FAMILIES, tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
NEW = 20
TREE = Budget(rows=8, depth=4, width=2)
STATIC: dict[str, Any] = {"cache_implementation": "static"}


class Counting:
    """A compiler that counts what it is given and leaves it as it is."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def reference(model: Any, prompt: torch.Tensor = PROMPT, new: int = NEW) -> torch.Tensor:
    with torch.inference_mode():
        return model.generate(prompt, max_new_tokens=new, do_sample=False)


def decode(model: Any, drafter: Any = "none", budget: Budget | None = None, **settings: Any) -> infer.Generation:
    return infer.generate(model, PROMPT, drafter, budget=budget, max_new_tokens=NEW, do_sample=False, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_static_caches_give_the_same_text(family: str) -> None:
    model = tiny_model(family, layers=3)
    text = reference(model)
    tree = RandomTree(text[0].tolist())
    assert torch.equal(decode(model, **STATIC).sequences, text)
    assert torch.equal(decode(model, tree, TREE, **STATIC).sequences, text)


def test_a_static_cache_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StaticCache] = []
    places: set[tuple[int, ...]] = set()
    widths: list[int] = []
    real = Target.forward

    def forward(self: Target, ids: torch.Tensor, *, cache: Any, mask: Any = None, **kwargs: Any) -> Any:
        made.append(cache)
        out = real(self, ids, cache=cache, mask=mask, **kwargs)
        places.add(tuple(layer.store.keys.data_ptr() for layer in cache.forgetting))
        widths.append(0 if mask is None else mask.shape[-1])
        return out

    monkeypatch.setattr(Target, "forward", forward)
    model = tiny_model("llama")
    text = decode(model, **STATIC).sequences[0].tolist()
    for seen in (made, places, widths):
        seen.clear()
    decode(model, RandomTree(text), TREE, **STATIC)
    assert isinstance(made[0], StaticCache) and len(set(map(id, made))) == 1
    assert len(places) == 1, "nothing is allocated twice"
    assert set(widths[1:]) == {made[0].capacity}


def test_a_static_cache_holds_what_it_was_made_for() -> None:
    model = tiny_model("llama")
    text = decode(model, **STATIC, max_cache_len=40)
    assert torch.equal(text.sequences, reference(model))
    with pytest.raises(ValueError, match=r"static cache is full: it holds 20 positions and 21 .*max_cache_len"):
        decode(model, **STATIC, max_cache_len=20)


def test_texts_of_different_lengths_share_a_static_cache() -> None:
    model = tiny_model("gemma3")
    prompts = torch.tensor([[0, 0, 7, 3, 44, 12, 9], [1, 30, 21, 5, 60, 2, 8], [0, 4, 4, 9, 33, 1, 6]])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": (prompts > 0).long()}
    usual = infer.generate(model, prompts, "lookup", **settings)
    ours = infer.generate(model, prompts, "lookup", **settings, **STATIC)
    assert torch.equal(ours.sequences, usual.sequences)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_compiled_passes_give_the_same_text_and_compile_once(family: str) -> None:
    model, compiler = tiny_model(family, layers=2), Counting()
    text = reference(model)
    known = text[0].tolist()
    for stable in (False, True):
        settings: dict[str, Any] = {
            "compile": True,
            "compile_config": CompileConfig(backend=compiler),
            "stable": stable,
        }
        assert torch.equal(decode(model, Oracle(known), Budget.chain(7), **settings).sequences, text)
        assert compiler.graphs > 0
        compiler.graphs = 0
        tree = decode(model, RandomTree(known), TREE, **settings)
        assert torch.equal(tree.sequences, text)
        assert tree.stats.tokens_per_round > 1
        assert compiler.graphs == 0, "as many rows, so nothing new"


def test_two_streams_have_a_compiled_cache_each() -> None:
    class Letters:
        all_special_ids: tuple[int, ...] = ()

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(chr(48 + int(i)) for i in ids)

        def convert_ids_to_tokens(self, token: int) -> str:
            return chr(48 + token)

    model = tiny_model("llama", layers=1)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": Letters(), "compile": True}
    settings["compile_config"] = CompileConfig(backend=Counting())
    both = [infer.stream(Target(model), PROMPT + at, **settings) for at in range(2)]
    mixed = [piece for pair in zip(*both, strict=True) for piece in pair]
    for at in range(2):
        assert "".join(mixed[at::2]) == Letters().decode(reference(model, PROMPT + at)[0, 9:])


def test_what_was_compiled_goes_with_the_model() -> None:
    def use() -> None:
        model = tiny_model("llama", layers=1)
        decode(model, compile=True, compile_config=CompileConfig(backend=Counting()))
        assert model in compiled._known

    before = len(compiled._known)
    use()
    torch._dynamo.reset()
    gc.collect()
    assert len(compiled._known) <= before


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"compile_config": CompileConfig()}, "compile_config belongs to compile=True"),
        ({"max_cache_len": 64}, "max_cache_len belongs to"),
        ({"compile": True, "num_return_sequences": 2, "do_sample": True}, "one text a call, and there are 2"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized' is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_named(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        infer.generate(tiny_model("llama", layers=1), PROMPT, **({"max_new_tokens": 4, "do_sample": False} | wrong))


def test_models_that_go_by_places_take_no_static_cache() -> None:
    with pytest.raises(ValueError, match=r"static cache is not supported for FalconForCausalLM"):
        decode(tiny_model("falcon", alibi=True), **STATIC)


@pytest.mark.real
def test_torchs_own_compiler_gives_the_same_text() -> None:
    model = tiny_model("llama", layers=1)
    text = reference(model)
    ours = decode(model, Oracle(text[0].tolist(), taps=()), Budget.chain(4), compile=True)
    assert torch.equal(ours.sequences, text)
