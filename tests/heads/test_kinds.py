"""The table of kinds: complete settings, nearest names, taps that a target has, and what eagle starts from."""

from __future__ import annotations

import pytest
import torch

import heads
from heads.config import ConfigError
from heads.kinds import KINDS, build, kind_of, make_config
from heads.target import Target
from tests.heads.small import random_ids, read, small_heads, small_target
from tests.tiny import tiny_model


def test_unknown_kinds_and_options_name_the_nearest() -> None:
    target = small_target()
    with pytest.raises(
        ConfigError, match=r"unknown kind of heads 'medussa' — did you mean 'medusa'\? \(known: medusa, e"
    ):
        kind_of("medussa")
    with pytest.raises(ConfigError, match=r"eagle options has the unknown key 'fc_nrom' — did you mean 'fc_norm'"):
        make_config("eagle", target, taps=(1, 2, 3), options={"fc_nrom": True})
    with pytest.raises(ConfigError, match="unknown key 'rope_theta'"):
        make_config("medusa", target, options={"rope_theta": 1.0})


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_complete(kind: str) -> None:
    target = small_target(layers=8)
    config = make_config(kind, target)
    assert config.lookahead == 5 and config.draft_vocab_size is None
    assert (config.hidden_size, config.vocab_size, config.target) == (32, 64, target.identity())
    assert config.options == KINDS[kind].default_options(target)
    changed = make_config(kind, target, lookahead=2, draft_vocab_size=9, options={"position_decay": 0.5})
    assert (changed.lookahead, changed.draft_vocab_size) == (2, 9)
    assert changed.options == config.options | {"position_decay": 0.5}
    assert type(build(config, target)) is KINDS[kind]
    assert build(changed, target).position_weights() == [1, 0.5]


def test_settings_that_cannot_be_are_refused() -> None:
    target = small_target()
    for lookahead in (0, -1):
        with pytest.raises(ConfigError, match=f"lookahead must be 1 or more, not {lookahead}"):
            make_config("medusa", target, lookahead=lookahead)
    for taps in ((5,), (-1, 2), ()):
        with pytest.raises(ConfigError, match="are not hidden states 0 to 4 of tiny/llama"):
            make_config("medusa", target, taps=taps)
    for size in (0, 65):
        with pytest.raises(ConfigError, match=f"draft_vocab_size must be 1 to 64, not {size}"):
            make_config("medusa", target, draft_vocab_size=size)


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6])
def test_targets_too_shallow_for_the_default_taps_are_refused(layers: int) -> None:
    """The taps 2, n/2 and n - 3 would be negative or the same twice."""
    target = Target(tiny_model("llama", layers=layers))
    with pytest.raises(
        ValueError, match=f"a target of {layers} layers has no three distinct taps .* name taps between"
    ):
        make_config("eagle", target)
    assert make_config("eagle", target, taps=(0, 1, 2)).taps == (0, 1, 2)


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (12, (2, 6, 9))])
def test_default_taps_of_deeper_targets(layers: int, taps: tuple[int, ...]) -> None:
    target = Target(tiny_model("llama", layers=layers))
    assert make_config("eagle", target).taps == taps
    assert make_config("medusa", target).taps == (layers,)


def test_taps_of_training_are_those_of_decoding_bit_for_bit() -> None:
    """One function reads both; its indices are those of transformers' hidden_states."""
    target = small_target(layers=8)
    taps = make_config("eagle", target).taps
    ids = random_ids(10)
    states = target.model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(read(target, taps, ids)[0], torch.cat([states[tap] for tap in taps], -1))


def test_eagle_takes_the_shape_of_its_target() -> None:
    for family, kv_heads, inner in (("llama", 2, 64), ("gptneox", 4, 64), ("gpt2", 4, 128)):
        target = small_target(family)
        options = make_config("eagle", target, taps=(1, 2, 3)).options
        assert (options["num_attention_heads"], options["num_key_value_heads"]) == (4, kv_heads)
        assert (options["head_dim"], options["intermediate_size"]) == (8, inner)
        made = small_heads("eagle", target)
        taps, _ = read(target, made.config.taps, random_ids(4))
        assert len(made.propose(made.start(taps, random_ids(5)), heads.Budget.chain(3))) == 3


def test_as_many_key_value_heads_as_of_queries() -> None:
    """On whatever target, and kept as a number, which is what engines read."""
    target = small_target("llama")
    config = make_config("eagle", target, taps=(1, 2, 3), options={"num_key_value_heads": "queries"})
    assert config.options["num_key_value_heads"] == 4
    assert build(config, target).state_dict()["layer.k_proj.weight"].shape[0] == 4 * 8


@pytest.mark.parametrize("draft_vocab", [None, 3])
def test_eagle_starts_with_the_targets_rows(draft_vocab: int | None) -> None:
    target = small_target()
    config = make_config("eagle", target, taps=(1, 2, 3), draft_vocab_size=draft_vocab)
    made = build(config, target).double()
    if draft_vocab:
        made.set_draft_vocabulary(torch.tensor([2, 5, 7]))
    made.initialize()
    rows = target.output.weight if draft_vocab is None else target.output.weight[[2, 5, 7]]
    assert torch.equal(made.state_dict()["lm_head.weight"], rows)
    assert made.state_dict()["lm_head.weight"].data_ptr() != target.output.weight.data_ptr()
    frozen = build(make_config("eagle", target, taps=(1, 2, 3), options={"train_output": False}), target)
    assert [name for name, p in frozen.named_parameters() if not p.requires_grad] == ["lm_head.weight"]


def test_eagle_starts_near_uniform_or_with_a_norm_of_ones() -> None:
    target = small_target()
    for uniform, norm in ((True, 1 / float(target.output.weight.float().norm(dim=1).mean())), (False, 1.0)):
        made = build(make_config("eagle", target, taps=(1, 2, 3), options={"uniform_start": uniform}), target)
        made.initialize()
        assert torch.allclose(made.state_dict()["norm.weight"], torch.tensor(norm))


def test_the_target_is_no_part_of_the_heads() -> None:
    target = small_target()
    for kind in KINDS:
        made = small_heads(kind, target)
        assert not any(p is q for p in made.parameters() for q in target.model.parameters())
        assert target.model not in list(made.modules())


def test_eagle_refuses_what_it_cannot_do() -> None:
    target = small_target()
    made = small_heads("eagle", target)
    ids = random_ids(5)
    taps, _ = read(target, made.config.taps, ids[:, :4])
    with pytest.raises(ValueError, match="padded prompts are not supported by eagle heads yet"):
        made.start(taps, ids, torch.tensor([[False, True, True, True]]))
    state = made.start(taps, ids, torch.ones(1, 4, dtype=torch.bool))
    made.propose(state, heads.Budget.chain(2))
    with pytest.raises(ValueError, match="nothing was committed since the last draft: advance the state first"):
        made.propose(state, heads.Budget.chain(2))
