"""Exports to the letter: exact keys, shapes and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from heads.formats import export_heads
from tests.heads.formats.cases import CASES, FULL, MEDUSA, OTHER, USUAL
from tests.heads.formats.engine import stored
from tests.heads.small import small_heads, small_target

LAYER = {
    "input_layernorm.weight": (32,),
    "hidden_norm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in stored(folder)[1].items()}


# what is written


def test_eagle3_flat_to_the_letter(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **USUAL, draft_vocab=20)
    done = export_heads(made, "eagle3", tmp_path / "out", dtype=torch.bfloat16)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    config, tensors = stored(tmp_path / "out")
    assert config == SHAPE | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": "bfloat16",
        "draft_vocab_size": 20,
        "norm_before_residual": False,
    }
    assert shapes(tmp_path / "out") == {f"midlayer.{name}": shape for name, shape in LAYER.items()} | {
        "fc.weight": (32, 96),
        "norm.weight": (32,),
        "lm_head.weight": (20, 32),
        "d2t": (20,),
        "t2d": (64,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    floats = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    assert {tensor.dtype for tensor in floats} == {torch.bfloat16}
    assert torch.equal(torch.arange(20) + tensors["d2t"], made.target_ids)
    assert done.engines == ("vllm", "sglang") and done.dtype == "bfloat16"


def test_the_map_holds_offsets(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **USUAL, draft_vocab=3)
    made.set_draft_vocabulary(torch.tensor([2, 5, 7]))
    export_heads(made, "eagle3", tmp_path / "out")
    assert stored(tmp_path / "out")[1]["d2t"].tolist() == [2, 4, 5]


def test_eagle3_of_other_taps_and_of_3_1(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **OTHER | FULL)
    for engine, ids in (("vllm", [1, 3, 7]), ("sglang", [0, 2, 6])):
        done = export_heads(made, "eagle3", tmp_path / engine, engine=engine)
        config, tensors = stored(tmp_path / engine)
        assert config["eagle_config"] == {
            "eagle_aux_hidden_state_layer_ids": ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
        }
        assert config["fc_norm"] is True and config["norm_output"] is True and config["rope_theta"] == 777.0
        assert "num_aux_hidden_states" not in config and done.engines == (engine,)
        assert {name for name in tensors if name.startswith("fc_norm")} == {f"fc_norm.{i}.weight" for i in range(3)}
    two = small_heads(target=small_target(layers=8), kind="eagle", taps=(1, 4))
    export_heads(two, "eagle3", tmp_path / "two", engine="vllm")
    assert stored(tmp_path / "two")[0]["num_aux_hidden_states"] == 2
    whole = stored(tmp_path / "two")[1].keys()
    assert "d2t" not in whole and "t2d" not in whole, "a whole vocabulary has no map"
    assert stored(tmp_path / "two")[0]["draft_vocab_size"] == 64


def test_transformers_reads_the_flat_config(tmp_path: Path) -> None:
    """The engines go through its Llama configuration, where the rotary base moved to another field."""
    export_heads(small_heads(target=small_target(layers=8), **USUAL, rope_theta=777.0), "eagle3", tmp_path / "out")
    read: Any = LlamaConfig.from_pretrained(tmp_path / "out")
    assert read.rope_parameters["rope_theta"] == 777.0 and read.rope_parameters["rope_type"] == "default"
    assert (read.num_key_value_heads, read.head_dim, read.draft_vocab_size) == (2, 8, 64)
    assert read.attention_bias is False and read.mlp_bias is False


def test_speculators_to_the_letter(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **OTHER | FULL, lookahead=4)
    export_heads(made, "speculators", tmp_path / "out", target_name="org/target")
    config, tensors = stored(tmp_path / "out")
    assert config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "torch_dtype": "float64",
        "draft_vocab_size": 20,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "embed_requires_grad": False,
        "target_hidden_size": 32,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 7],
        "transformer_layer_config": SHAPE | {"rope_theta": 777.0, "rms_norm_eps": 1e-3},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert shapes(tmp_path / "out") == {f"layers.0.{name}": shape for name, shape in LAYER.items()} | {
        "fc.weight": (32, 96),
        **{f"fc_norm.{i}.weight": (32,) for i in range(3)},
        "norm.weight": (32,),
        "lm_head.weight": (20, 32),
        "embed_tokens.weight": (64, 32),
        "d2t": (20,),
        "t2d": (64,),
    }
    assert torch.equal(tensors["embed_tokens.weight"], made.target.embedding.weight)


def test_medusa_to_the_letter(tmp_path: Path) -> None:
    made = small_heads(target=small_target(), **MEDUSA, lookahead=2, layers=2, own_output=True)
    done = export_heads(made, "medusa", tmp_path / "out", target_name="org/target")
    config, _ = stored(tmp_path / "out")
    assert config == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "org/target",
        "version": "2",
    }
    assert (tmp_path / "out" / "medusa_lm_head.safetensors").is_file() and done.engines == ()
    blocks = [(k, layer) for k in range(2) for layer in range(2)]
    assert shapes(tmp_path / "out") == {
        **{f"{k}.{layer}.linear.weight": (32, 32) for k, layer in blocks},
        **{f"{k}.{layer}.linear.bias": (32,) for k, layer in blocks},
        **{f"{k}.2.weight": (64, 32) for k in range(2)},
    }
    shared = small_heads(target=small_target(), **MEDUSA, lookahead=2)
    export_heads(shared, "medusa", tmp_path / "shared")
    assert shapes(tmp_path / "shared").keys() == {
        f"{k}.0.linear.{part}" for k in range(2) for part in ("weight", "bias")
    }


def test_medusa_for_vllm_to_the_letter(tmp_path: Path) -> None:
    made = small_heads(target=small_target(), **MEDUSA, lookahead=2, draft_vocab=20)
    done = export_heads(made, "medusa", tmp_path / "out", engine="vllm")
    assert "vLLM 0.32.0 was seen to refuse" in done.notes[0], "it is the form that earlier versions read"
    config, tensors = stored(tmp_path / "out")
    assert config == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 32,
        "vocab_size": 64,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "truncated_vocab_size": 20,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
    assert shapes(tmp_path / "out") == {
        **{f"blocks.{k}.layers.0.weight": (32, 32) for k in range(2)},
        **{f"blocks.{k}.layers.0.bias": (32,) for k in range(2)},
        **{f"lm_heads.{k}.weight": (20, 32) for k in range(2)},
        "token_map": (20,),
    }
    assert torch.equal(tensors["token_map"], made.target_ids)
    assert torch.equal(tensors["lm_heads.1.weight"], made.target.output.weight[made.target_ids])


def test_dflash_to_the_letter(tmp_path: Path) -> None:
    made = CASES["dflash"].make()
    export_heads(made, "dflash", tmp_path / "out", dtype=torch.float32)
    config, _ = stored(tmp_path / "out")
    assert config == SHAPE | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "attention_bias": False,
        "rope_theta": 777.0,
        "torch_dtype": "float32",
        "block_size": 5,
        "num_target_layers": 8,
        "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3, 4]},
    }
    layer = LAYER | {f"self_attn.{name}_proj.weight": (rows, 32) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
    layer |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
    del layer["hidden_norm.weight"]
    assert shapes(tmp_path / "out") == {
        **{f"layers.{i}.{name}": size for i in range(2) for name, size in layer.items()},
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
    }


def test_dspark_to_the_letter(tmp_path: Path) -> None:
    made = CASES["dspark full"].make()
    export_heads(made, "dspark", tmp_path / "out", dtype=torch.float32)
    config, tensors = stored(tmp_path / "out")
    own = {"mask_token_id": 63, "target_layer_ids": [1, 3, 4]}
    assert config == SHAPE | own | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "attention_bias": False,
        "torch_dtype": "float32",
        "block_size": 4,
        "num_target_layers": 8,
        "draft_vocab_size": 20,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dflash_config": own,
    }
    rest = {name: size for name, size in shapes(tmp_path / "out").items() if not name.startswith("layers.")}
    assert rest == {
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (20, 32),
        "markov_head.markov_w1.weight": (64, 6),
        "markov_head.markov_w2.weight": (20, 6),
        "confidence_head.proj.weight": (1, 38),
        "confidence_head.proj.bias": (1,),
        "d2t": (20,),
        "t2d": (64,),
    }
    assert not tensors["confidence_head.proj.bias"].any()
