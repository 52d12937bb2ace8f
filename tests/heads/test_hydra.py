"""Hydra heads: what they start from, what each head reads, one small step a token, a window that bounds the store."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from heads.config import ConfigError
from heads.grow import Budget
from heads.hydra import Hydra
from heads.kinds import build, make_config
from tests.heads.parity import text_for
from tests.heads.small import batch_of, random_ids, read, relative, small_heads, small_target, soft_ce


def random_hydra(**options: Any) -> Hydra:
    """Every weight random."""
    return cast(Hydra, small_heads("hydra", small_target(), **options))


def fresh(draft_vocab: int | None = None, taps: tuple[int, ...] | None = None, **options: Any) -> Hydra:
    """As training starts from."""
    config = make_config("hydra", small_target(), lookahead=3, taps=taps, draft_vocab_size=draft_vocab, options=options)
    made = build(config, small_target()).double()
    if draft_vocab is not None:
        made.set_draft_vocabulary(torch.arange(1, 1 + 2 * draft_vocab, 2))
    made.initialize()
    return cast(Hydra, made.eval())


def started(made: Hydra, length: int = 9) -> tuple[Any, torch.Tensor]:
    """A state after a prompt, and the prompt with its root."""
    ids = text_for(made, length + 1)
    taps, _ = read(made.target, made.config.taps, ids[:, :length])
    return made.start(taps, ids), ids


@pytest.mark.parametrize("taps", [None, (1, 2, 4)])
@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_every_head_starts_as_the_targets_next_token_head(
    draft_vocab: int | None, own_output: bool, taps: tuple[int, ...] | None
) -> None:
    made = fresh(draft_vocab, taps, own_output=own_output, layers=2)
    batch = batch_of(made.target, made.config.taps, random_ids(12))
    for step in made.unroll(batch):
        wanted = made.target.project_rows(batch.hidden[step.batch, step.row], made.draft_ids)
        assert relative(step.logits, wanted) < 1e-12
    assert ("lm_head.weight" in made.state_dict()) == own_output
    report = made.loss(batch, soft_ce)
    report.total.backward()
    moved = [name for name, p in made.named_parameters() if p.grad is not None and bool(p.grad.any())]
    assert {"blocks.0.0.linear.weight", "blocks.2.0.residual.weight", "layer.o_proj.weight"} <= set(moved)


def test_each_head_reads_the_tokens_before_its_own_and_each_block_is_its_own() -> None:
    made = random_hydra(layers=3)
    sizes = [tuple(head[0].linear.weight.shape) for head in made.blocks]  # type: ignore[index]
    assert sizes == [(32, 64), (32, 96), (32, 128)]
    blocks = [name for name in made.state_dict() if name.startswith("blocks.1.")]
    assert len(blocks) == 3 + 2 * 2 and "blocks.1.2.1.linear.weight" in blocks
    weights = made.state_dict()
    assert not torch.equal(weights["blocks.1.1.1.linear.weight"], weights["blocks.1.2.1.linear.weight"])
    assert weights["blocks.1.1.1.linear.weight"].data_ptr() != weights["blocks.1.2.1.linear.weight"].data_ptr()


def test_a_token_of_the_path_changes_what_is_drafted_behind_it_alone() -> None:
    made = random_hydra()
    state, _ = started(made)
    with torch.no_grad():
        grower = made.grower(state)
        grower.first()
        below = grower.after([0, 1, 2], [7, 9, 7], [-1, -1, -1])
        assert torch.equal(below[0], below[2]) and relative(below[0], below[1]) > 0.01
        deeper = grower.after([3, 4, 5], [7, 9, 7, 5, 5, 5], [-1, -1, -1, 0, 1, 2])
        assert torch.equal(deeper[0], deeper[2]) and relative(deeper[0], deeper[1]) > 0.01


def test_a_draft_leaves_the_prefix_alone_and_drafts_between_commits_share_it() -> None:
    made = random_hydra()
    passes: list[int] = []
    assert made.layer is not None
    made.layer.register_forward_hook(lambda module, inputs, output: passes.append(output.shape[1]))
    state, ids = started(made)
    first = made.propose(state, Budget.chain(3))
    tree = made.propose(state, Budget(14, 3, 3))
    assert made.propose(state, Budget.chain(3)) == first and len(tree) == 13
    assert passes == [1] and state.store.lengths == [9], "one row of one pass"
    taps, _ = read(made.target, made.config.taps, torch.cat([ids, ids[:, :1]], 1))
    made.advance(state, taps[:, 9:11], ids[:, :2])
    made.propose(state, Budget.chain(2))
    assert passes == [1, 1] and state.store.lengths == [11]


def test_a_window_bounds_what_is_read_and_kept() -> None:
    made = random_hydra(window=4)
    reads: list[int] = []
    assert made.layer is not None
    made.layer.k_proj.register_forward_hook(lambda module, inputs, output: reads.append(output.shape[1]))
    state, ids = started(made, 20)
    made.propose(state, Budget.chain(3))
    assert reads == [4] and state.store.lengths == [4] and state.rows == 20
    taps, _ = read(made.target, made.config.taps, ids)
    made.advance(state, taps[:, -2:], ids[:, -2:])
    made.propose(state, Budget.chain(3))
    assert reads == [4, 2] and state.store.lengths == [4] and state.rows == 22


def test_no_draft_is_deeper_than_the_heads() -> None:
    made = random_hydra()
    state, _ = started(made)
    for budget in (Budget.chain(4), Budget(30, 4, 2)):
        with pytest.raises(ValueError, match="a draft of depth 4 > 3 heads: ask for a shallower budget"):
            made.propose(state, budget)


def test_dropout_is_for_training_alone() -> None:
    made = random_hydra(dropout=0.5, layers=2)
    batch = batch_of(made.target, made.config.taps, random_ids(9))
    plain = [step.logits for step in random_hydra(layers=2).unroll(batch)]
    assert all(torch.equal(a.logits, b) for a, b in zip(made.unroll(batch), plain, strict=True))
    made.train()
    assert not any(torch.equal(a.logits, b) for a, b in zip(made.unroll(batch), plain, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be 1 or more"),
        ({"dropout": 1.0}, "dropout 0 to below 1"),
        ({"window": -1}, "window must be a whole number from 0 .* not '-1'"),
        ({"window": 0.5}, "window must be a whole number from 0 .* not '0.5'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh(**options)


def test_ruined_weights_still_draft() -> None:
    made = random_hydra()
    for parameter in made.parameters():
        parameter.data.fill_(float("nan"))
    state, _ = started(made)
    assert len(made.propose(state, Budget.chain(3))) == 3


def test_padded_prompts_are_refused() -> None:
    made = random_hydra()
    ids = random_ids(5)
    taps, _ = read(made.target, made.config.taps, ids[:, :4])
    with pytest.raises(ValueError, match="padded prompts are not supported by hydra heads"):
        made.start(taps, ids, torch.tensor([[False, True, True, True]]))
