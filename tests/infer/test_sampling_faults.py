"""Sampling where others changed the law or ignored a setting: typical acceptance, bias, seeds, tiny temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig

import infer
from heads.draft import Draft
from heads.grow import Budget
from heads.judge import TeacherRows
from heads.target import Target
from infer import verify
from infer.verify import At, Chooser, Verdict
from tests.heads.small import batch_of
from tests.infer.fakes import Branching, enumerate_law
from tests.infer.test_greedy import random_heads
from tests.tiny import tiny_model

P, Q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
PROMPT = torch.tensor([[7, 3, 44]])


class Fixed:
    """p at every node."""

    foresight = True

    def p(self, node: int) -> Tensor:
        return P

    peek = p

    def settle(self, path: Sequence[int]) -> None:
        pass

    def best(self, node: int) -> int:
        return int(P.argmax())


def typical(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """What is called typical acceptance: any token above min(ε, δ·exp(−entropy)) passes. Not a rule of ours."""
    p = at.p(-1)
    threshold = min(0.09, 0.3 * float((p * p.log()).sum().exp()))
    return Verdict([0], 0) if float(p[draft.tokens[0]]) > threshold else Verdict([], chooser.sample(p))


def test_typical_acceptance_is_not_sampling_and_not_offered() -> None:
    def first(rule: verify.Rule) -> list[float]:
        def run(chooser: Branching) -> int:
            path, last = rule(Draft.chain([0]), Fixed(), chooser)
            return 0 if path else last

        law = enumerate_law(run)
        return [law.get(token, 0.0) for token in range(4)]

    assert first(typical) == [1.0, 0.0, 0.0, 0.0], "0.0834 < 0.1: token 0 always, 0.9 away from p"
    for name, rule in verify.RULES.items():
        if name != "greedy":
            assert first(rule) == pytest.approx(P.tolist(), abs=1e-6), name
    with pytest.raises(ValueError, match="'typical'"):
        infer.generate(tiny_model("llama"), PROMPT, rule="typical", do_sample=True, max_new_tokens=3)


def test_a_banned_token_never_comes_in_two_thousand() -> None:
    """The token that comes most, biased away: none in the text, drafted or the target's own."""
    model = tiny_model("llama", layers=2)
    heads = random_heads(model, "medusa")
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 250}
    ids = PROMPT.expand(8, -1)
    free = infer.generate(model, ids, heads, seed=1, **sampled).sequences[:, 3:]
    top = int(free.flatten().bincount(minlength=64).argmax())
    out = infer.generate(model, ids, heads, seed=2, sequence_bias={(top,): -100.0}, **sampled)
    new = out.sequences[:, 3:]
    assert new.numel() == 2000
    assert int((free == top).sum()) > 60
    assert int((new == top).sum()) == 0
    assert out.stats.accepted > 0


def test_seeds_mixed_in_a_batch_are_those_of_single_calls() -> None:
    model = tiny_model("gpt2")
    heads = random_heads(model, "medusa")
    prompts = [torch.tensor([row]) for row in ([7, 3, 44], [9], [5, 61, 7, 8, 22])]
    ids = torch.tensor([[0, 0, 7, 3, 44], [0, 0, 0, 0, 9], [5, 61, 7, 8, 22]])
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 14}
    rows = infer.generate(model, ids, heads, seed=[5, 5, 3], attention_mask=(ids != 0).long(), **sampled).sequences
    for row, prompt, seed in zip(rows, prompts, (5, 5, 3), strict=True):
        alone = infer.generate(model, prompt, heads, seed=seed, **sampled).sequences[0]
        assert torch.equal(row[-alone.shape[0] :], alone)
        assert torch.equal(alone, infer.generate(model, prompt, heads, seed=seed, **sampled).sequences[0])


@pytest.mark.parametrize("limit", [{"temperature": 1e-6}, {"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-9}])
@pytest.mark.parametrize("draft", ["medusa", "eagle", "lookup", "layers:0-1"])
def test_the_greedy_limit_of_every_drafter(limit: dict[str, Any], draft: str) -> None:
    """Temperatures that overflow float32 logits included: transformers warps in float32, and so the text is its own."""
    model = tiny_model("llama")
    greedy = model.generate(PROMPT, max_new_tokens=20, do_sample=False)
    drafter = random_heads(model, draft) if draft in ("medusa", "eagle") else draft
    try:
        model.generate(PROMPT, max_new_tokens=20, do_sample=True, **limit)
    except (RuntimeError, ValueError) as theirs:
        with pytest.raises(type(theirs)):
            infer.generate(model, PROMPT, drafter, max_new_tokens=20, do_sample=True, seed=0, **limit)
        return
    for budget in (None, Budget(rows=6, depth=3, width=2)):
        out = infer.generate(
            model,
            PROMPT,
            drafter,
            max_new_tokens=20,
            do_sample=True,
            seed=0,
            budget=budget,
            output_scores=True,
            **limit,
        )
        assert torch.equal(out.sequences, greedy)


def capped() -> Any:
    """A strong soft-cap, and weights that reach it."""
    model = tiny_model("gemma2", final_logit_softcapping=5.0)
    with torch.no_grad():
        model.lm_head.weight *= 4
    return model


def scaled() -> Any:
    """Logits times 0.125."""
    config = CohereConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.125,
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize("make", [capped, scaled])
def test_a_soft_cap_or_scale_counts_in_drafts_verification_and_loss(make: Any) -> None:
    """Leaving it out would spare the arg-max and change the distribution."""
    model = make()
    target = Target(model)
    heads = random_heads(model, "medusa")
    out = infer.generate(
        target,
        PROMPT,
        heads,
        do_sample=True,
        top_k=0,
        max_new_tokens=16,
        seed=0,
        output_scores=True,
        budget=Budget.chain(2),
    )
    with torch.no_grad():
        logits = model(out.sequences).logits[0, PROMPT.shape[1] - 1 : -1].float()
    assert out.scores is not None
    torch.testing.assert_close(torch.cat(out.scores), logits, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        raw = target.output(target.forward(out.sequences, hidden=True).hidden)[0].float()
    assert float((raw[PROMPT.shape[1] - 1 : -1].softmax(-1) - logits.softmax(-1)).abs().sum(-1).max()) > 0.2

    batch = batch_of(target, heads.config.taps, out.sequences)
    teacher = TeacherRows(target, batch, None)
    with torch.no_grad():
        taught = model(out.sequences).logits[0][batch.loss_mask.roll(-1, 1)[0]][: len(teacher)]
    torch.testing.assert_close(teacher.logits(slice(None)).double(), taught, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(teacher.lse.double(), taught.logsumexp(-1), rtol=1e-5, atol=1e-5)
