"""Mtp heads: their adapter is PEFT's, acts on mask rows alone, and is all that is trained and stored."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor

from heads.config import ConfigError
from heads.forward import run
from heads.grow import Budget
from heads.kinds import build, make_config
from heads.lora import linear_layers
from heads.mtp import Mtp
from heads.target import Target
from tests.heads.inside import small_mtp
from tests.heads.small import batch_of, random_ids, relative, small_target, soft_ce
from tests.tiny import FAMILIES, tiny_model


def fresh(**options: Any) -> Mtp:
    """As training starts from."""
    target = small_target()
    made = build(make_config("mtp", target, options=options), target).double()
    assert isinstance(made, Mtp)
    made.initialize()
    return made


def slots_of(texts: int, rows: int, masks: int = 3) -> Tensor:
    return (torch.arange(rows) % masks).expand(texts, -1)


def hooks(target: Target) -> int:
    """How many there are; transformers has some of its own."""
    return sum(len(module._forward_hooks) for module in target.model.modules())


# the adapter


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_layers_to_adapt(family: str) -> None:
    """With masks in a pass, verified rows give what they give without: the same to rounding, and no hook stays."""
    target = Target(tiny_model(family, layers=2))
    made = small_mtp(target)
    ids = random_ids(9, rows=2)
    rows = torch.cat([ids, torch.zeros(2, 3, dtype=torch.long)], 1)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    target.forward(ids, hidden=True)
    before = hooks(target)
    with made.applied(target, 9, slots_of(2, 3)):
        beside = target.forward(rows, mask=mask, hidden=True)
    alone = target.forward(ids, hidden=True)
    bound = 1e-6 if target.config._attn_implementation == "eager" else 1e-10
    assert relative(beside.logits[:, :9], alone.logits) <= bound
    assert beside.hidden is not None and alone.hidden is not None
    assert relative(beside.hidden[:, :9], alone.hidden) <= bound
    assert hooks(target) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_verified_rows_are_the_same_bits_whatever_the_adapter(dtype: torch.dtype) -> None:
    target = small_target(dtype=dtype)
    ids, found = random_ids(12), []
    for seed in range(3):
        made = small_mtp(target, seed=seed)
        with made.applied(target, 9, slots_of(1, 3)):
            found.append(target.forward(ids, taps=(1, 2), hidden=True))
    for other in found[1:]:
        for name in ("logits", "taps", "hidden"):
            ours, theirs = getattr(found[0], name), getattr(other, name)
            assert torch.equal(ours[:, :9], theirs[:, :9])
            assert not torch.equal(ours[:, 9:], theirs[:, 9:])


@pytest.mark.parametrize("options", [{}, {"lora_modules": ["q_proj", "up_proj"], "lora_rslora": True}])
def test_the_adapter_is_one_of_peft(options: dict[str, Any]) -> None:
    """PEFT reads it by its names, and on rows that are all masks computes the same."""
    made = small_mtp(small_target(), **options)
    tensors = {name: value for name, value in made.state_dict().items() if name.startswith("base_model.")}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    o = made.config.options
    config = LoraConfig(
        r=o["lora_r"], lora_alpha=o["lora_alpha"], target_modules=o["lora_modules"], use_rslora=o["lora_rslora"]
    )
    model = get_peft_model(tiny_model("llama"), config)
    missing: Any = set_peft_model_state_dict(model, tensors)
    assert not missing.unexpected_keys and not [name for name in missing.missing_keys if "lora" in name]
    model = model.double()
    model.get_input_embeddings().weight.data[:3] = made.masks.data
    slots = slots_of(1, 7)
    theirs = model(slots).logits
    with made.applied(made.target, 0, slots):
        ours = made.target.forward(torch.zeros(1, 7, dtype=torch.long)).logits
    assert relative(ours, theirs) <= 1e-12
    assert relative(ours, made.target.forward(slots).logits) > 1e-3


def test_it_starts_as_nothing() -> None:
    """PEFT's B is zero and so is the sampler's last matrix: masks are read by the target as it is."""
    made = fresh(lora_r=4)
    assert all(not bool(pair.lora_B.weight.any()) and bool(pair.lora_A.weight.any()) for pair in made.adapter.values())
    states = torch.randn(5, 32, dtype=torch.float64)
    assert torch.equal(made.logits(states, torch.arange(5)), made.project(states))
    known = made.target.embedding.weight
    assert float(made.masks.detach().std()) == pytest.approx(float(known.std()), rel=0.5)
    assert len({tuple(row) for row in made.masks.tolist()}) == 5


def test_other_threads_passes_are_left_alone() -> None:
    made = small_mtp(small_target())
    ids = random_ids(6)
    alone = made.target.forward(ids).logits
    found = []
    with made.applied(made.target, 3, slots_of(1, 3)):
        other = threading.Thread(target=lambda: found.append(made.target.forward(ids).logits))
        other.start()
        other.join()
        here = made.target.forward(ids).logits
    assert torch.equal(found[0], alone) and not torch.equal(here[:, 3:], alone[:, 3:])


def test_passes_of_other_rows_are_refused_and_no_hook_stays() -> None:
    made = small_mtp(small_target())
    before = hooks(made.target)
    message = r"a pass of \(1, 5\) rows has no \(1, 3\) rows of heads from 3 on"
    with pytest.raises(ValueError, match=message), made.applied(made.target, 3, slots_of(1, 3)):
        made.target.forward(random_ids(5))
    assert hooks(made.target) == before
    message = r"has no model\.layers\.0\.self_attn\.q_proj, which these heads adapt"
    with pytest.raises(ValueError, match=message), made.applied(Target(tiny_model("gptneox")), 0, slots_of(1, 3)):
        pass


# training


def test_gradients_reach_what_is_trained_and_nothing_of_the_target() -> None:
    target = Target(copy.deepcopy(small_target().model))
    made = small_mtp(target).train()
    before = target.weights_hash()
    batch = batch_of(target, made.config.taps, random_ids(20, rows=2), random_ids(20, rows=2, vocab=2).bool())
    made.loss(batch, soft_ce).total.backward()
    assert {name for name, p in made.named_parameters() if p.grad is None or not bool(p.grad.any())} == set()
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert target.weights_hash() == before
    assert not any(name.startswith("target") for name in made.state_dict())


def test_other_texts_padding_and_untrained_rows_change_nothing() -> None:
    made = small_mtp(small_target(), draft_vocab=20)
    lengths = (24, 17, 9)
    texts = [random_ids(n, seed=n) for n in lengths]
    marks = [random_ids(n, seed=9, vocab=2).bool() for n in lengths]
    together = {name: torch.zeros(3, 24, dtype=kind) for name, kind in (("ids", torch.long), ("marks", torch.bool))}
    for row, (text, mark) in enumerate(zip(texts, marks, strict=True)):
        together["ids"][row, : text.shape[1]], together["marks"][row, : text.shape[1]] = text, mark
    batch = batch_of(made.target, made.config.taps, together["ids"], together["marks"])
    whole = [
        {(b, r): step.logits[n] for n, (b, r) in enumerate(zip(step.batch.tolist(), step.row.tolist(), strict=True))}
        for step in made.unroll(batch)
    ]
    for number, (text, mark) in enumerate(zip(texts, marks, strict=True)):
        for j, step in enumerate(made.unroll(batch_of(made.target, made.config.taps, text, mark))):
            assert step.row.tolist() == [row for row in range(text.shape[1] - 2) if mark[0, row + 2]]
            for n, row in enumerate(step.row.tolist()):
                if row + 2 + j < text.shape[1]:
                    assert relative(step.logits[n], whole[j][number, row]) <= 1e-10


def test_anchors_are_drawn_anew_and_their_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_mtp(small_target(), anchors=0.3)
    masks = torch.zeros(3, 20, dtype=torch.bool)
    masks[0], masks[1, 5:9] = True, True  # 18 and 4 trained rows, and none
    batch = batch_of(made.target, made.config.taps, random_ids(20, rows=3), masks)
    assert int(made.count(masks)) == 22 == len(next(iter(made.unroll(batch))).row)
    made.train()
    seen = set()
    for _ in range(6):
        step = next(iter(made.unroll(batch)))
        assert step.batch.tolist() == [0] * 6 + [1] * 2, "ceil(5.4) and ceil(1.2)"
        seen.add(tuple(step.row.tolist()))
    assert len(seen) > 3
    assert int(made.count(masks)) == 8 == int(made.loss(batch, soft_ce).count)
    whole = list(made.eval().unroll(batch))
    monkeypatch.setattr("heads.behind.PASS_ROWS", 10)  # one anchor a pass
    for step, other in zip(whole, made.unroll(batch), strict=True):
        assert relative(step.logits, other.logits) <= 1e-10


@pytest.mark.parametrize("training", [True, False])
def test_texts_of_which_nothing_is_trained_still_have_gradients(training: bool) -> None:
    """Zeros: processes that work together wait for one of every parameter."""
    made = small_mtp(small_target()).train(training)
    batch = batch_of(made.target, made.config.taps, random_ids(9), torch.zeros(1, 9, dtype=torch.bool))
    report = made.loss(batch, soft_ce)
    assert int(made.count(batch.loss_mask)) == int(report.count) == 0 and float(report.total.detach()) == 0
    report.total.backward()
    assert all(p.grad is not None and not bool(p.grad.any()) for p in made.parameters())


def test_the_target_runs_without_autocast_and_the_adapter_under_it() -> None:
    """What is trained in bfloat16 beside a float32 target reads states in float32, as when decoding."""
    made = small_mtp(small_target(dtype=torch.float32))
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: Any, inputs: Any, output: Tensor) -> None:
        seen[name] = output.dtype

    layer = made.target.layers[0].mlp.up_proj  # type: ignore[union-attr]
    hooks = [
        layer.register_forward_hook(partial(note, "target")),  # type: ignore[union-attr]
        made.adapter["model.layers.0.mlp.up_proj"].lora_A.register_forward_hook(partial(note, "adapter")),
    ]
    slots = slots_of(1, 3)
    with torch.autocast("cpu", torch.bfloat16), made.applied(made.target, 0, slots):
        run(made.target, slots)
    for hook in hooks:
        hook.remove()
    assert seen == {"target": torch.float32, "adapter": torch.bfloat16}


# drafting


def test_without_masks_in_the_last_pass_there_is_no_draft() -> None:
    made = small_mtp(small_target())
    state = made.start(torch.zeros(1, 4, 32, dtype=torch.float64), random_ids(5))
    assert len(made.propose(state, Budget.chain(3))) == 0
    made.read(state, torch.randn(1, 2, 32, dtype=torch.float64))
    assert len(made.propose(state, Budget.chain(3))) == 2 == len(made.propose(state, Budget.chain(2)))
    assert max(made.propose(state, Budget(12, 3, 3)).depths) == 2
    assert len(made.propose(state, Budget.static([(0,), (0, 0), (0, 0, 0)]))) == 2
    with pytest.raises(ValueError, match="a draft of depth 3 > 2 masks of the last pass"):
        made.grower(state).after([1], [5, 6], [-1, 0])
    with pytest.raises(ValueError, match="padded prompts are not supported by mtp heads"):
        made.start(torch.zeros(1, 4, 32), random_ids(5), torch.tensor([[False, True, True, True]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_r": 0}, "lora_r and sampler_size must be 1 or more"),
        ({"lora_dropout": 1.0}, "lora_dropout must be 0 or more and below 1, not 1.0"),
        ({"anchors": 0}, "anchors must be a share above 0, at most 1, not 0"),
        ({"lora_modules": ["qkv"]}, r"lora options: .*qkv.* \(linear layers of this target: down_proj, gate_proj"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh(**options)


def test_targets_that_cannot_carry_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"taps must be \[4\], the last state, not \[2\]"):
        build(make_config("mtp", small_target(), taps=(2,)), small_target())
    target = Target(tiny_model("falcon", alibi=True))
    with pytest.raises(ConfigError, match="reads nothing but one text in order, because its ALiBi"):
        build(make_config("mtp", target), target)
    assert len(linear_layers(Target(tiny_model("gpt2")))) == 4 * 4, "GPT-2's layers are linear, too"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_packed_into_a_row_know_nothing_of_each_other(family: str) -> None:
    """Gemma 3's windows count positions of a text, not columns of its row."""
    narrow: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    target = Target(tiny_model(family, layers=2, **(narrow if family == "gemma3" else {})))
    made = small_mtp(target)
    texts = [random_ids(n, seed=n) for n in (9, 13)]

    def rows(ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1])[None]

    alone = [made.read_masks(batch_of(target, made.config.taps, ids), rows(ids)) for ids in texts]
    both = torch.cat(texts, 1)
    batch = batch_of(target, made.config.taps, both)
    batch.documents = torch.tensor([[1] * 9 + [2] * 13])
    found = made.read_masks(batch, rows(both))
    for part, own in ((found[:, :9], alone[0]), (found[:, 9:], alone[1])):
        within = part.shape[1] - 3  # masks behind the last rows reach beyond the text, and are judged by nothing
        assert relative(part[:, :within], own[:, :within]) <= 1e-10
