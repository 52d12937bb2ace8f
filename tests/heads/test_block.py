"""Block heads: what they start from, their mask, their anchors, one pass a draft."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from heads import block_layer
from heads.block import Block
from heads.block_layer import BlockLayer
from heads.config import ConfigError
from heads.grow import Budget
from heads.kinds import build, make_config
from heads.mask_token import unused_token
from heads.target import Target
from tests.heads.parity import text_for
from tests.heads.small import batch_of, random_ids, read, relative, small_heads, small_target, soft_ce
from tests.tiny import tiny_model

TAPS = (1, 2, 3)


def random_block(**options: Any) -> Block:
    """Every weight random."""
    return cast(Block, small_heads("block", small_target(), lookahead=4, **options))


def fresh(draft_vocab: int | None = None, **options: Any) -> Block:
    """As training starts from."""
    config = make_config("block", small_target(), taps=TAPS, draft_vocab_size=draft_vocab, options=options)
    made = build(config, small_target()).double()
    if draft_vocab is not None:
        made.set_draft_vocabulary(torch.arange(1, 1 + 2 * draft_vocab, 2))
    made.initialize()
    return cast(Block, made)


def started(made: Block, length: int = 9) -> tuple[Any, torch.Tensor]:
    """A state after a prompt, and the prompt with its root."""
    ids = text_for(made, length + 1)
    taps, _ = read(made.target, made.config.taps, ids[:, :length])
    return made.start(taps, ids), ids


# what they start from


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_they_start_near_uniform_on_the_targets_rows_without_a_bias(draft_vocab: int | None, own_output: bool) -> None:
    made = fresh(draft_vocab, own_output=own_output)
    rows = made.target.output.weight if draft_vocab is None else made.target.output.weight[made.target_ids]
    assert [name for name in made.state_dict() if name.startswith("lm_head")] == ["lm_head.weight"] * own_output
    if made.lm_head is not None:
        assert torch.equal(made.lm_head.weight.double(), rows) and made.lm_head.weight.requires_grad
    hidden = made.norm(torch.randn(50, 32, dtype=torch.float64))
    logits = made.unary(hidden)
    assert torch.allclose(logits, hidden @ rows.T)
    assert float(logits.detach().std()) < 2
    assert torch.equal(made.biased(logits, torch.arange(50)), logits)
    assert made.markov is not None
    lengths = made.markov.w1.weight.detach().norm(dim=1)
    assert float(lengths.min()) > 0.7 and float(lengths.max()) < 1.3


def test_each_layer_has_weights_of_its_own() -> None:
    made = random_block(layers=3)
    first, second, third = (cast(BlockLayer, layer) for layer in made.layers)
    assert not torch.equal(first.q_proj.weight, second.q_proj.weight)
    assert not torch.equal(second.q_proj.weight, third.q_proj.weight)
    sizes = {n: sum(p.numel() for p in random_block(layers=n).parameters()) for n in (1, 2, 3)}
    assert sizes[3] - sizes[2] == sizes[2] - sizes[1] == sum(p.numel() for p in first.parameters())
    names = {name for name, _ in first.named_parameters()}
    assert {"q_norm.weight", "k_norm.weight", "k_proj.weight"} <= names


def test_its_default_taps_are_eagles() -> None:
    target = small_target(layers=12)
    assert make_config("block", target).taps == make_config("eagle", target).taps == (2, 6, 9)
    with pytest.raises(ValueError, match="no three distinct taps"):
        make_config("block", small_target())


# the mask


def test_the_mask_is_a_token_that_is_not_special() -> None:
    special = {"bos_token_id": 60, "eos_token_id": [63, 61], "pad_token_id": 62}
    for tokens, mask in (({}, 63), ({"pad_token_id": 63}, 62), (special, 59)):
        target = Target(tiny_model("llama", **tokens))
        assert unused_token(target) == mask
        assert make_config("block", target, taps=TAPS).options["mask_token_id"] == mask
    target.model.generation_config.eos_token_id = 59
    assert unused_token(target) == 58
    for wrong in (61, 62, 59, 64):
        with pytest.raises(ConfigError, match=f"mask_token_id must be 0 to 63 and no token that .*not {wrong}"):
            build(make_config("block", target, taps=TAPS, options={"mask_token_id": wrong}), target)
    with pytest.raises(ConfigError, match=r"mask_token_id must be a whole number from 0 .*not '-1'"):
        build(make_config("block", target, taps=TAPS, options={"mask_token_id": -1}), target)


def test_the_mask_is_what_the_slots_read() -> None:
    one, other = random_block(), random_block(mask_token_id=5)
    roots = torch.tensor([[3, 8]])
    embedding = one.target.embedding.weight
    assert one.slots(roots).shape == (1, 2, 4, 32)
    assert torch.equal(one.slots(roots)[0, 1], embedding[[8, 63, 63, 63]])
    assert torch.equal(other.slots(roots)[0, 0], embedding[[3, 5, 5, 5]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be 1 or more"),
        ({"markov_rank": -1}, "markov_rank must be a whole number from 0"),
        ({"anchors": 0}, "anchors must be a share above 0, at most 1, not 0"),
        ({"anchors": 1.5}, "not 1.5"),
        ({"stop_below": 0.5}, "stop_below needs confidence: true"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh(**options)


# anchors


def test_each_training_pass_draws_anchors_anew_and_their_number_is_known() -> None:
    made = random_block(anchors=0.3)
    masks = torch.zeros(3, 20, dtype=torch.bool)
    masks[0], masks[1, 5:9] = True, True  # 18 and 4 trained rows, and none
    batch = batch_of(made.target, made.config.taps, random_ids(20, rows=3), masks)
    whole = {(int(b), int(r)) for step in made.unroll(batch) for b, r in zip(step.batch, step.row, strict=True)}
    assert len(whole) == 22 == int(made.count(masks)), "all of them where it is not trained"
    made.train()
    seen = []
    for _ in range(40):
        steps = list(made.unroll(batch))
        rows = list(zip(steps[0].batch.tolist(), steps[0].row.tolist(), strict=True))
        assert set(rows) <= whole and len(set(rows)) == len(rows) and rows == sorted(rows)
        assert [b for b, _ in rows] == [0] * 6 + [1] * 2, "ceil(5.4) and ceil(1.2)"
        seen.append(rows)
    assert {row for rows in seen for row in rows} == whole, "every row has its turn"
    assert len({tuple(rows) for rows in seen}) > 30
    assert int(made.count(masks)) == 8 == sum(int(made.count(mask[None])) for mask in masks)
    assert int(made.loss(batch, soft_ce).count) == 8
    torch.manual_seed(3)
    first = next(iter(made.unroll(batch))).row
    torch.manual_seed(3)
    assert torch.equal(next(iter(made.unroll(batch))).row, first), "torch's generator decides"


def test_a_block_is_the_same_whichever_others_there_are() -> None:
    made = random_block(anchors=0.2, confidence=True)
    batch = batch_of(made.target, made.config.taps, random_ids(20, rows=2))
    every = [
        {(b, r): step.logits[n] for n, (b, r) in enumerate(zip(step.batch.tolist(), step.row.tolist(), strict=True))}
        for step in made.unroll(batch)
    ]
    for j, step in enumerate(made.train().unroll(batch)):
        assert len(step.logits) == 8
        for n, key in enumerate(zip(step.batch.tolist(), step.row.tolist(), strict=True)):
            assert relative(step.logits[n], every[j][key]) < 1e-12


def test_all_rows_may_be_anchors() -> None:
    made = random_block(anchors=1)
    batch = batch_of(made.target, made.config.taps, random_ids(12))
    evaluated = [step.logits for step in made.unroll(batch)]
    for step, wanted in zip(made.train().unroll(batch), evaluated, strict=True):
        assert torch.equal(step.logits, wanted)


def test_blocks_are_attended_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made = random_block()
    batch = batch_of(made.target, made.config.taps, random_ids(14, rows=2))
    with torch.no_grad():
        whole = [step.logits for step in made.unroll(batch)]
        for scores in (1, 2500):
            monkeypatch.setattr(block_layer, "SCORES", scores)
            for step, wanted in zip(made.unroll(batch), whole, strict=True):
                assert relative(step.logits, wanted) < 1e-12


@pytest.mark.parametrize("training", [True, False])
def test_texts_of_which_nothing_is_trained_cost_nothing(training: bool) -> None:
    made = random_block(confidence=True).train(training)
    batch = batch_of(made.target, made.config.taps, random_ids(9), torch.zeros(1, 9, dtype=torch.bool))
    report = made.loss(batch, soft_ce)
    assert int(made.count(batch.loss_mask)) == int(report.count) == 0
    assert float(report.total.detach()) == 0 and report.counts.tolist() == [0] * 4


# drafting


def test_a_draft_is_one_pass_and_leaves_context_alone() -> None:
    made = random_block()
    passes: list[int] = []
    made.layers[0].register_forward_hook(lambda module, inputs, output: passes.append(output.shape[1]))
    state, ids = started(made)
    first = made.propose(state, Budget.chain(4))
    tree = made.propose(state, Budget(20, 4, 3))
    assert made.propose(state, Budget.chain(4)) == first and len(tree) == 19
    assert passes == [4], "drafts between two commits share it"
    assert [store.lengths for store in state.stores] == [[9], [9]]
    taps, _ = read(made.target, made.config.taps, torch.cat([ids, ids[:, :1]], 1))
    made.advance(state, taps[:, 9:11], ids[:, :2])
    made.propose(state, Budget.chain(2))
    assert passes == [4, 4] and [store.lengths for store in state.stores] == [[11], [11]]


def test_no_draft_is_deeper_than_the_block() -> None:
    made = random_block()
    state, _ = started(made)
    for budget in (Budget.chain(5), Budget(30, 5, 2)):
        with pytest.raises(ValueError, match="a draft of depth 5 > 4 slots of a block: ask for a shallower budget"):
            made.propose(state, budget)


@pytest.mark.parametrize("markov_rank", [0, 8])
def test_nodes_of_a_depth_differ_by_their_own_tokens_alone(markov_rank: int) -> None:
    made = random_block(markov_rank=markov_rank, draft_vocab=20)
    state, ids = started(made)
    with torch.no_grad():
        grower = made.grower(state)
        root = grower.first()
        below = grower.after([0, 1, 2], [7, 9, 7], [-1, -1, -1])
        _, unary = state.drafted()
        if made.markov is None:
            assert torch.equal(root, unary[0]) and all(torch.equal(row, unary[1]) for row in below)
            return
        assert torch.equal(below[0], below[2])
        w1, w2 = made.markov.w1.weight, made.markov.w2.weight
        assert w1.shape == (64, 8) and w2.shape == (20, 8)
        assert torch.allclose(root, unary[0] + w2 @ w1[ids[0, -1]])
        assert torch.allclose(below[1], unary[1] + w2 @ w1[9])


def test_ruined_weights_still_draft() -> None:
    made = random_block(confidence=True, stop_below=0.5)
    for parameter in made.parameters():
        parameter.data.fill_(float("nan"))
    state, _ = started(made)
    assert len(made.propose(state, Budget.chain(3))) == 3


def test_padded_prompts_are_refused() -> None:
    made = random_block()
    ids = random_ids(5)
    taps, _ = read(made.target, made.config.taps, ids[:, :4])
    with pytest.raises(ValueError, match="padded prompts are not supported by block heads"):
        made.start(taps, ids, torch.tensor([[False, True, True, True]]))
