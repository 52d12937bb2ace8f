"""Medusa: independent blocks that begin as the target's next-token head, and drafts no deeper than its heads."""

from __future__ import annotations

import pytest
import torch

from heads.grow import Budget
from heads.kinds import build, make_config
from heads.medusa import Medusa
from heads.target import Target
from tests.heads.small import batch_of, random_ids, read, small_heads, small_target, soft_ce
from tests.tiny import tiny_model


def fresh(target: Target, *, draft_vocab: int | None = None, **options: object) -> Medusa:
    """As training starts from."""
    config = make_config("medusa", target, lookahead=3, draft_vocab_size=draft_vocab, options=dict(options))
    made = build(config, target).to(target.dtype)
    assert isinstance(made, Medusa)
    if draft_vocab is not None:
        made.set_draft_vocabulary(torch.arange(1, 1 + 2 * draft_vocab, 2))
    made.initialize()
    return made


@pytest.mark.parametrize(("layers", "parameters"), [(1, 72), (2, 144)])
def test_each_layer_has_weights_of_its_own(layers: int, parameters: int) -> None:
    """One repeated module would have 72 parameters however many layers there are."""
    target = Target(tiny_model("llama", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4))
    made = fresh(target, layers=layers)
    assert len(made.blocks) == 3
    assert all(sum(p.numel() for p in head.parameters()) == parameters for head in made.blocks)
    assert sum(p.numel() for p in made.parameters()) == 3 * parameters
    batch = batch_of(target, made.config.taps, random_ids(12))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(2):  # where all blocks are zero those of a head have one gradient; from there on they part
        optimizer.zero_grad()
        made.loss(batch, soft_ce).total.backward()
        optimizer.step()
    weights = [p for head in made.blocks for name, p in head.named_parameters() if name.endswith("weight")]
    assert len(weights) == 3 * layers
    assert all(bool((w != 0).any()) for w in weights)
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i]), "they learned apart"


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, 20])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_head_starts_as_the_targets_own(family: str, draft_vocab: int | None, own_output: bool) -> None:
    target = small_target(family)
    made = fresh(target, draft_vocab=draft_vocab, own_output=own_output, layers=2)
    ids = random_ids(12)
    taps, hidden = read(target, made.config.taps, ids)
    assert torch.equal(taps, hidden), "it reads what the output matrix reads"
    wanted = target.project_rows(hidden, made.draft_ids)
    for k in range(3):
        assert torch.equal(made.head(k, taps), wanted)
    draft = made.propose(made.start(taps, torch.cat([ids, ids[:, :1]], 1)), Budget.chain(3))
    best = int(wanted[0, -1].argmax())
    assert draft.tokens == (best if made.draft_ids is None else int(made.draft_ids[best]),) * 3


def test_own_output_matrices_are_copies() -> None:
    target = small_target()
    made = fresh(target, own_output=True)
    assert len(made.outputs) == 3
    before = target.weights_hash()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1.0)
    assert target.weights_hash() == before
    assert len(fresh(target).outputs) == 0


@pytest.mark.parametrize(
    "budget",
    [Budget.chain(3), Budget(30, 3, 2), Budget.static([(0,), (0, 0), (0, 0, 0)])],
    ids=["chain", "tree", "static"],
)
def test_drafts_deeper_than_the_heads_are_refused(budget: Budget) -> None:
    """Two heads and a tree three deep."""
    target = small_target()
    made = small_heads("medusa", target, lookahead=2)
    ids = random_ids(6)
    taps, _ = read(target, made.config.taps, ids[:, :5])
    with pytest.raises(ValueError, match="a draft of depth 3 > 2 heads: ask for a shallower budget"):
        made.propose(made.start(taps, ids), budget)
    assert max(made.propose(made.start(taps, ids), budget.within(2)).depths) == 2


def test_heads_do_not_look_at_what_was_drafted() -> None:
    target = small_target()
    made = small_heads("medusa", target, lookahead=3)
    assert isinstance(made, Medusa)
    ids = random_ids(6)
    taps, _ = read(target, made.config.taps, ids[:, :5])
    grower = made.grower(made.start(taps, ids))
    one, two = grower.after([0, 1], [3, 9], [-1, -1])
    assert torch.equal(one, two) and torch.equal(one, made.head(1, taps[0, -1]))
