"""Batches, caches and adapted targets where others failed: each row is its single run, on every real drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import infer
from heads.base import DraftHeads
from heads.grow import Budget
from heads.target import Target
from infer.drafters.draft_model import DraftModelDrafter
from tests.heads.small import batch_of, soft_ce
from tests.infer.fakes import Oracle, RandomTree
from tests.infer.test_greedy import greedy, random_heads
from tests.infer.test_stream import TOKENIZERS
from tests.tiny import tiny_model

PROMPTS = [[7, 3, 44], [5, 61, 7, 8, 22, 10, 11, 3, 2], [9]]
NEW = 14
DRAFTS = ("medusa", "eagle", "lookup", "layers:0-1", "layers:0,2-3", "model", "lookup|heads")


def padded() -> tuple[Tensor, Tensor]:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    return ids, (ids != 0).long()


def drafter_of(name: str, model: Any) -> Any:
    from infer import drafters

    heads = random_heads(model, "medusa" if name == "medusa" else "eagle")
    if name == "model":
        return DraftModelDrafter(tiny_model("llama", layers=2, seed=3))
    spec = "heads" if name in ("medusa", "eagle") else name
    return drafters.make(spec, heads, heads.target)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_prompts_of_three_nine_and_one_tokens_together(family: str, draft: str) -> None:
    """Rotary and learned positions, left padding, rows that accept different numbers."""
    model = tiny_model(family)
    alone = [greedy(model, torch.tensor([prompt]), max_new_tokens=NEW) for prompt in PROMPTS]
    ids, mask = padded()
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    budget = Budget.chain(3) if family == "gpt2" else Budget(rows=8, depth=3, width=2)
    out = infer.generate(model, ids, drafter_of(draft, model), budget=budget, **settings)
    for row, own in zip(out.sequences.tolist(), alone, strict=True):
        assert row[-len(own) :] == own
    end = alone[1][len(PROMPTS[1]) + 3]
    settings["eos_token_id"] = end
    out = infer.generate(model, ids, drafter_of(draft, model), **settings)
    assert torch.equal(out.sequences, model.generate(ids, **settings))


@pytest.mark.parametrize("draft", ["tree", "eagle", "lookup", "layers:0-1", "layers:0,2-3"])
@pytest.mark.parametrize("model", ["mistral", "gemma3"])
def test_windows_of_eight_over_forty_tokens(model: str, draft: str) -> None:
    """What a window has dropped is there again when a draft is rejected; what was rejected is not."""
    target = tiny_model(model, sliding_window=8, layers=6 if model == "gemma3" else 4)
    prompt = torch.tensor([[7, 3, 44, 12, 9]])
    text = greedy(target, prompt, max_new_tokens=40)
    drafter = RandomTree(text) if draft == "tree" else drafter_of(draft, target)
    budget = Budget(rows=10, depth=3, width=3)
    out = infer.generate(target, prompt, drafter, max_new_tokens=40, do_sample=False, budget=budget)
    assert out.sequences[0].tolist() == text
    if draft != "eagle":
        return
    both = torch.tensor([[0, 0, 0, 7, 3], [7, 3, 44, 12, 9]])
    rows = infer.generate(target, both, drafter, attention_mask=(both != 0).long(), max_new_tokens=40, do_sample=False)
    assert rows.sequences[1].tolist() == text
    assert rows.sequences[0, 3:].tolist() == greedy(target, both[:1, 3:], max_new_tokens=40)


def test_a_vocabulary_larger_than_the_tokenizers() -> None:
    """64 ids and a tokenizer that knows fewer: an id it does not know is text '' and one token of the figures."""
    model, tokenizer = tiny_model("llama", vocab=320), TOKENIZERS["bytes"]

    def say(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, [65, 310, 66, 319][ids.shape[1] % 4]] = 1e4
        return scores

    script = [1, 2, 66, 319, 65, 310, 66, 319]
    for draft in (Oracle(script), random_heads(model, "medusa"), "lookup"):
        pieces: list[str] = []
        out = infer.generate(
            model,
            torch.tensor([[1, 2]]),
            draft,
            tokenizer=tokenizer,
            stream=pieces.append,
            max_new_tokens=6,
            do_sample=False,
            logits_processor=[say],
        )
        assert out.sequences[0].tolist() == script
        assert out.texts == ["BAB"] and "".join(pieces) == "BAB"
        assert out.stats.tokens == 6 == 1 + sum(r.emitted for r in out.stats.log)


def test_heads_on_an_adapted_target(tmp_path: Path) -> None:
    """Training and decoding see the adapter; it is not trained, the heads are saved, and they load again."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama")
    prompt = torch.tensor([PROMPTS[1]])
    plain = greedy(base, prompt, max_new_tokens=NEW)
    model: Any = get_peft_model(
        base, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    ).double()
    text = greedy(model, prompt, max_new_tokens=NEW)
    assert text != plain
    adapter = {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}

    heads = random_heads(model, "medusa")
    target = heads.target
    ids = torch.tensor([text])
    batch = batch_of(target, heads.config.taps, ids)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(batch.taps, torch.cat([states[tap] for tap in heads.config.taps], -1)), "adapter on"
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
    heads.loss(batch, soft_ce).total.backward()
    optimizer.step()
    assert all(torch.equal(p, adapter[name]) for name, p in model.named_parameters() if name in adapter)

    heads.save_pretrained(tmp_path)
    with safe_open(tmp_path / "heads.safetensors", "pt") as file:
        assert not any("lora_" in name or "embed" in name for name in file.keys())  # noqa: SIM118
    loaded = DraftHeads.from_pretrained(tmp_path, Target(model)).double()
    for drafter in (heads, loaded):
        out = infer.generate(model, prompt, drafter, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0].tolist() == text
        assert out.stats.proposed > 0
