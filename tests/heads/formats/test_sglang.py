"""Exports that are said to be right in SGLang: every parameter of its models is set, by a tensor of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from heads.base import DraftHeads
from heads.formats import FormatError, export_heads
from tests.heads.formats.cases import BLOCK, CASES, DSPARK, OTHER, USUAL, Case
from tests.heads.formats.edit import reconfigure, rewrite
from tests.heads.formats.sglang import captured, loaded, target_ids

MADE = {name: CASES[name] for name in ("eagle3", "eagle3 reduced", "eagle3 3.1", "eagle3 shape")} | {
    "other taps": Case(OTHER | {"draft_vocab": 20, "fc_norm": True}, "eagle3", "sglang"),
    "two taps": Case({"kind": "eagle", "taps": (1, 4)}, "eagle3", "sglang"),
    "shallow": Case({"kind": "eagle", "taps": (1, 2, 3)}, "eagle3", "sglang", layers=4),
    "eagle1": CASES["eagle1 sglang"],
    "eagle1 without bias": Case({"kind": "eagle1", "bias": False}, "eagle1", "sglang"),
    "dflash": CASES["dflash"],
    "dflash shape": CASES["dflash shape"],
    "dspark": CASES["dspark"],
    "dspark sure": Case({**DSPARK, "own_output": False, "taps": (2, 4, 5), "markov_rank": 6}, "dspark", "sglang"),
}


def exported(name: str, folder: Path) -> DraftHeads:
    case = MADE[name]
    made = case.make()
    assert "sglang" in export_heads(made, case.to, folder, engine=case.engine).engines
    return made


@pytest.mark.parametrize("name", MADE)
def test_each_parameter_is_set_and_no_tensor_is_passed_over(name: str, tmp_path: Path) -> None:
    made = exported(name, tmp_path / "out")
    config, tensors = loaded(tmp_path / "out")
    if made.config.kind == "eagle1":
        return  # it reads the target's last state, whatever the config says
    assert tuple(captured(config, made.target.num_layers)) == made.config.taps
    if made.config.kind == "eagle":
        wanted = range(64) if made.draft_ids is None else made.target_ids.tolist()
        assert target_ids(config, tensors) == list(wanted)
        assert (config.fc_norm if made.config.options["fc_norm"] else True) is True
        assert getattr(config, "norm_output", False) == made.config.options["norm_output"]
    else:  # a slot each for the root and what it drafts; or the root's slot drafts, too
        assert config.block_size == made.config.lookahead + (not made.config.options["shifted"])
        assert config.dflash_config["mask_token_id"] == made.config.options["mask_token_id"]


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


MISTAKES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "norm under another name": (
        "eagle3 3.1",
        lambda folder: rewrite(folder, lambda held: _renamed(held, "norm.weight", "final_norm.weight")),
    ),
    "norms of taps that it is not told of": ("eagle3 3.1", lambda folder: reconfigure(folder, drop=("fc_norm",))),
    "no output matrix": ("eagle3", lambda folder: rewrite(folder, lambda held: held.pop("lm_head.weight"))),
    "ids outside": (
        "other taps",
        lambda folder: reconfigure(
            folder, drop=("eagle_config",), eagle_aux_hidden_state_layer_ids=[0, 2, 6], num_aux_hidden_states=3
        ),
    ),
    "vllm's ids": (
        "other taps",
        lambda folder: reconfigure(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}),
    ),
    "target ids for offsets": (
        "eagle3 reduced",
        lambda folder: rewrite(folder, lambda held: held.__setitem__("d2t", held["t2d"].nonzero()[:, 0])),
    ),
    "no map": ("eagle3 reduced", lambda folder: rewrite(folder, lambda held: held.pop("d2t"))),
    "no bias": ("eagle1", lambda folder: rewrite(folder, lambda held: held.pop("fc.bias"))),
    "a block too long": ("dflash", lambda folder: reconfigure(folder, block_size=4)),
    "a causal block": ("dflash", lambda folder: reconfigure(folder, layer_types=["sliding_attention"] * 2)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str, tmp_path: Path) -> None:
    name, change = MISTAKES[mistake]
    made = exported(name, tmp_path / "out")
    change(tmp_path / "out")
    with pytest.raises(AssertionError):
        config, tensors = loaded(tmp_path / "out")
        assert tuple(captured(config, made.target.num_layers)) == made.config.taps
        if made.config.kind == "eagle":
            assert target_ids(config, tensors) == made.target_ids.tolist()
        assert config.block_size == made.config.lookahead + 1


def test_what_it_would_pass_over_is_refused(tmp_path: Path) -> None:
    for options in ({}, {"draft_vocab": 20}):
        made = Case({**DSPARK, "taps": (2, 4), "markov_rank": 4, **options}, "dspark").make()
        with pytest.raises(FormatError, match="SGLang's DSpark speaks through the target's output matrix"):
            export_heads(made, "dspark", tmp_path / "out", engine="sglang")
        assert not (tmp_path / "out").exists()
        assert export_heads(made, "dspark", tmp_path / f"vllm{len(options)}").engines == ("vllm",)
    for case in (
        Case({"kind": "medusa"}, "medusa"),
        Case(USUAL, "speculators"),
        Case(BLOCK | {"taps": (2, 8)}, "dflash"),
    ):
        with pytest.raises(FormatError):
            export_heads(case.make(), case.to, tmp_path / "out", engine="sglang")
