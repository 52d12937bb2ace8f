"""Heads that draft inside the verification pass: the target's own text, in every way of decoding; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import infer
from heads.base import DraftHeads
from heads.forward import TargetOutput
from heads.grow import Budget
from heads.identity import TargetMismatch
from heads.target import Target
from infer.drafters import FirstToSpeak, HeadsDrafter, Merged
from tests.heads.inside import small_mtp
from tests.heads.small import small_target
from tests.infer.fakes import RandomTree
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
RAGGED = torch.tensor([[0, 0, 0, 9, 30, 21, 5, 60], [7, 3, 44, 12, 9, 30, 21, 5], [0, 0, 0, 0, 0, 0, 8, 8]])
NEW = 20
BUDGETS: dict[str, Budget | None] = {
    "usual": None,
    "two rows": Budget.chain(1),
    "chain": Budget.chain(7),
    "tree": Budget(rows=24, depth=3, width=3),
    "static tree": Budget.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (2,)]),
}


# windows narrower than the text
EXTRA: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def target_of(family: str, dtype: torch.dtype = torch.float64) -> Target:
    extra = EXTRA if family == "gemma3" else {}
    return Target(tiny_model(family, dtype=dtype, layers=2, **extra), name=f"tiny/{family}")


def greedy(model: Any, ids: Tensor = PROMPT, **settings: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **settings)


def riding(made: DraftHeads, text: Tensor, seed: int) -> FirstToSpeak:
    """Random trees with right paths in them draft; the heads' rows ride along."""
    return FirstToSpeak([RandomTree(text[0].tolist(), seed), HeadsDrafter(made)])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_text_is_the_targets(family: str, cache: str) -> None:
    made = small_mtp(target_of(family))
    model, text = made.target.model, greedy(made.target.model)
    settings: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    drafted = 0
    for budget in BUDGETS.values():
        out = infer.generate(model, PROMPT, made, budget=budget, max_new_tokens=NEW, do_sample=False, **settings)
        assert torch.equal(out.sequences, text)
        drafted += out.stats.proposed
    assert drafted > 50
    for seed in range(3):
        out = infer.generate(
            model,
            PROMPT,
            riding(made, text, seed),
            budget=BUDGETS["tree"],
            max_new_tokens=NEW,
            do_sample=False,
            **settings,
        )
        assert torch.equal(out.sequences, text) and out.stats.tokens_per_round > 1.3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ragged_prompts_are_decoded_as_they_are_alone(family: str, cache: str) -> None:
    made = small_mtp(target_of(family))
    mask = (RAGGED != 0).long()
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    text = made.target.model.generate(RAGGED, attention_mask=mask, **settings)
    settings |= {"cache_implementation": "static"} if cache == "static" else {}
    for budget in (Budget.chain(7), BUDGETS["tree"]):
        out = infer.generate(made.target.model, RAGGED, made, budget=budget, attention_mask=mask, **settings)
        assert torch.equal(out.sequences, text)
    drawn: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }
    together = infer.generate(made.target.model, RAGGED, made, seed=[1, 2, 3], budget=Budget(12, 3), **drawn)
    for row in range(3):
        alone = infer.generate(
            made.target.model,
            RAGGED[row : row + 1],
            made,
            seed=row + 1,
            budget=Budget(12, 3),
            **drawn | {"attention_mask": mask[row : row + 1]},
        )
        assert torch.equal(together.sequences[row], alone.sequences[0])


def test_rows_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_mtp(small_target())
    passes: list[int] = []
    real = Target.forward

    def forward(self: Target, ids: Tensor, **rest: Any) -> TargetOutput:
        passes.append(ids.shape[1])
        return real(self, ids, **rest)

    monkeypatch.setattr(Target, "forward", forward)
    for budget in BUDGETS.values():
        passes.clear()
        out = infer.generate(made.target.model, PROMPT, made, budget=budget, max_new_tokens=NEW, do_sample=False)
        own = passes[-len(out.stats.log) :]
        assert [r.rows for r in out.stats.log] == own
        assert max(own) <= (16 if budget is None else budget.rows)
        assert any(r.rows > 1 + r.proposed for r in out.stats.log), "masks are rows"
    plain = infer.generate(made.target.model, PROMPT, "none", max_new_tokens=4, do_sample=False)
    assert [r.rows for r in plain.stats.log] == [1, 1, 1]


def test_in_the_same_pass_verified_rows_are_the_same_bits_with_any_adapter() -> None:
    """In bfloat16, where everything rounds: logits of every token, under two sets of random heads."""
    target = target_of("llama", torch.bfloat16)
    text = greedy(target.model)
    one, other = small_mtp(target), small_mtp(target, seed=1)
    found = []
    for made in (one, other):
        out = infer.generate(
            target.model,
            PROMPT,
            riding(made, text, 5),
            budget=Budget(24, 3, 3),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
        )
        found.append(out)
    assert [r.rows for r in found[0].stats.log] == [r.rows for r in found[1].stats.log]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert found[0].logits is not None and found[1].logits is not None
    assert all(map(torch.equal, found[0].logits, found[1].logits))
    assert not torch.equal(one.masks, other.masks)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stable_passes_do_not_depend_on_it(family: str) -> None:
    made = small_mtp(target_of(family, torch.bfloat16))
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "stable": 12, "output_logits": True}
    plain = infer.generate(made.target.model, PROMPT, "none", **settings)
    for draft, budget in (
        (made, None),
        (made, Budget(12, 3, 3)),
        (riding(made, plain.sequences, 1), Budget(12, 3, 2)),
    ):
        out = infer.generate(made.target.model, PROMPT, draft, budget=budget, **settings)
        assert out.stats.proposed > 0
        assert torch.equal(out.sequences, plain.sequences)
        assert out.logits is not None and plain.logits is not None
        assert all(map(torch.equal, out.logits, plain.logits))


def test_hybrids_with_lookup() -> None:
    made = small_mtp(small_target())
    model, text = made.target.model, greedy(made.target.model)
    for draft in ("lookup:1+heads", "lookup:1|heads", "heads|lookup:1"):
        out = infer.generate(made.target.model, PROMPT, _with(draft, made), max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out.sequences, text)
        assert any(r.rows > 1 + r.proposed for r in out.stats.log) and out.stats.proposed
    with pytest.raises(ValueError, match="only one drafter of a hybrid can draft inside"):
        twice = Merged([HeadsDrafter(made), HeadsDrafter(made)])
        infer.generate(model, PROMPT, twice, max_new_tokens=NEW, do_sample=False)


def _with(spec: str, made: DraftHeads) -> Any:
    from infer.drafters import specs

    return specs.read(spec, made, made.target)


def test_a_prefix_cache_knows_nothing_of_masks() -> None:
    made = small_mtp(small_target())
    text = greedy(made.target.model)
    known = infer.PrefixCache()
    for _ in range(2):
        out = infer.generate(made.target.model, PROMPT, made, prefix_cache=known, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out.sequences, text)
    assert out.stats.reused == PROMPT.shape[1] - 1
    longer = text[:, :-4]
    again = infer.generate(made.target.model, longer, made, prefix_cache=known, max_new_tokens=4, do_sample=False)
    assert torch.equal(again.sequences, text) and again.stats.reused > PROMPT.shape[1]


def test_positions_run_out() -> None:
    made = small_mtp(Target(tiny_model("llama", layers=2, max_position_embeddings=30)))
    text = made.target.model.generate(PROMPT, max_length=30, do_sample=False)
    for budget in BUDGETS.values():
        out = infer.generate(made.target.model, PROMPT, made, budget=budget, max_length=30, do_sample=False)
        assert torch.equal(out.sequences, text)


def test_no_mask_stands_beyond_the_border_of_longrope() -> None:
    """A pass that reaches over it would turn all of its positions, the verified ones too, differently."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    rope |= {"original_max_position_embeddings": 24, "factor": 4.0}
    made = small_mtp(Target(tiny_model("llama", layers=2, rope_parameters=rope, max_position_embeddings=96)))
    text = made.target.model.generate(PROMPT, max_length=24, do_sample=False)
    for budget in BUDGETS.values():
        out = infer.generate(made.target.model, PROMPT, made, budget=budget, max_length=24, do_sample=False)
        assert torch.equal(out.sequences, text)


# an adapter of the target's own


def adapted(**settings: Any) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
    return get_peft_model(tiny_model("llama", layers=2), config).double().eval()


def test_the_targets_own_adapter_stays_its_own(tmp_path: Path) -> None:
    model = adapted()
    target = Target(model, name="tiny/adapted")
    bare = Target(tiny_model("llama", layers=2), name="tiny/adapted")
    text = greedy(model)
    assert not torch.equal(text, greedy(bare.model))
    weights, identity = target.weights_hash(), target.identity()
    made = small_mtp(target)
    assert {name.partition(".lora")[0] for name in made.base_model.state_dict()} == {
        name.partition(".lora")[0] for name in small_mtp(bare).base_model.state_dict()
    }, "names without a wrapper's"
    for budget in BUDGETS.values():
        out = infer.generate(model, PROMPT, made, budget=budget, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out.sequences, text)
    assert target.weights_hash() == weights and Target(model, name="tiny/adapted").identity() == identity
    made.save_pretrained(tmp_path)
    with pytest.raises(TargetMismatch, match="adapter"):
        DraftHeads.from_pretrained(tmp_path, bare)
    back = DraftHeads.from_pretrained(tmp_path, Target(model))
    assert torch.equal(infer.generate(model, PROMPT, back, max_new_tokens=NEW, do_sample=False).sequences, text)
    # PEFT's wrapper decodes with the model inside, whose layers are the adapted ones
    through = model.generate(
        input_ids=PROMPT, custom_generate=infer.custom_generate(made), max_new_tokens=NEW, do_sample=False
    )
    assert torch.equal(through, text)


def test_another_copy_of_the_target_decodes(tmp_path: Path) -> None:
    made = small_mtp(small_target())
    made.save_pretrained(tmp_path)
    model = tiny_model("llama")
    text = greedy(model)
    model(PROMPT, output_hidden_states=True)  # transformers puts hooks of its own in place
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    back = DraftHeads.from_pretrained(tmp_path, small_target())
    ours = [
        infer.generate(each, PROMPT, back, max_new_tokens=NEW, do_sample=False) for each in (model, back.target.model)
    ]
    assert torch.equal(ours[0].sequences, text)
    assert [r.accepted for r in ours[0].stats.log] == [r.accepted for r in ours[1].stats.log]
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks, "none stays"


# refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": True}, "compile=True is not supported with heads that draft inside"),
    ],
)
def test_what_is_not_supported_is_named(settings: dict[str, Any], message: str) -> None:
    made = small_mtp(small_target())
    with pytest.raises(ValueError, match=message):
        infer.generate(made.target.model, PROMPT, made, max_new_tokens=4, do_sample=False, **settings)
