"""Other first weights: what of the target they hold, and heads that they are not for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.kinds import build, make_config
from tests.train.world import tiny_target
from train.compare.starts import STARTS


def test_the_targets_last_layer_reads_the_state_as_it_does_there() -> None:
    target = tiny_target()
    theirs: Any = target.layers[-1]
    width = target.hidden_size
    torch.manual_seed(0)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        theirs.get_submodule(norm).get_parameter("weight").data.uniform_(0.5, 2.0)
    heads: Any = build(make_config("eagle", target, lookahead=3, taps=(1, 2, 3)), target)
    fresh = {name: value.clone() for name, value in heads.state_dict().items()}
    STARTS["target_layer"](heads)
    state = torch.randn(5, width, dtype=torch.float64)
    for name in ("q", "k", "v"):
        own, other = heads.layer.get_submodule(f"{name}_proj"), theirs.get_submodule(f"self_attn.{name}_proj")
        # a plain norm and the folded weights are the target's norm and weights
        plain = torch.nn.functional.rms_norm(state, (width,), eps=theirs.input_layernorm.variance_epsilon)
        there = other(theirs.input_layernorm(state))
        assert torch.allclose(plain @ own.weight[:, width:].double().T, there, rtol=1e-5, atol=1e-5), name
        assert torch.equal(own.weight[:, :width], fresh[f"layer.{name}_proj.weight"][:, :width]), "of the embedding"
    assert torch.equal(heads.layer.o_proj.weight.double(), theirs.self_attn.o_proj.weight.float().double())
    assert torch.equal(heads.layer.down_proj.weight.double(), theirs.mlp.down_proj.weight.float().double())
    gate = theirs.mlp.gate_proj.weight * theirs.post_attention_layernorm.weight
    assert torch.allclose(heads.layer.gate_proj.weight.double(), gate, rtol=1e-6)


def test_heads_without_such_a_layer_are_refused() -> None:
    target = tiny_target()
    heads = build(make_config("medusa", target, lookahead=3), target)
    with pytest.raises(ValueError, match="medusa heads cannot start as a layer of tiny"):
        STARTS["target_layer"](heads)
