"""What is handed over is what was prepared: texts, shape, states; what peers execute needs nothing of ours."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.heads.small import relative
from tests.train.peers.conftest import contest_of, handed
from train.peers import handover as making
from train.peers.contest import HERE
from train.peers.handover import write_states
from train.peers.inside.job import Texts, digest, same_names


def test_texts_are_the_prepared_conversations(world: Path) -> None:
    handover = handed(world)
    texts, own = Texts(handover.folder), handover.conversations
    assert len(texts) == len(own) == 8
    for index in range(8):
        assert torch.equal(texts.ids(index), own.ids(index))
        assert torch.equal(texts.loss_mask(index), own.loss_mask(index)) and texts.loss_mask(index).any()
    assert torch.equal(texts.draft_ids, handover.heads.target_ids)


def test_shape_names_everything_by_value(world: Path) -> None:
    handover = handed(world)
    told = json.loads((handover.folder / "shape.json").read_text())
    assert told == {
        "target": str((world / "target").resolve()), "target_dtype": "float32", "hidden_size": 32, "vocab_size": 264,
        "max_positions": 512, "taps": [1, 2, 3], "lookahead": 3, "draft_vocab_size": 100, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "position_decay": 0.8, "fc_norm": False, "norm_output": False,
    }  # fmt: skip


def test_states_are_the_taps_and_the_last_one_before_its_norm(world: Path) -> None:
    handover = handed(world)
    folder, seconds = write_states(handover, world)
    assert seconds > 0 and write_states(handover, world) == (folder, seconds), "made once"
    target = handover.target
    for index in range(8):
        held = load_file(folder / f"hs_{index}.safetensors")
        ids = handover.conversations.ids(index)
        assert torch.equal(held["token_ids"], ids)
        out = target.forward(ids[None], taps=(1, 2, 3), hidden=True)
        assert out.taps is not None and out.hidden is not None
        assert held["hidden_states"].shape == (len(ids), 4, 32)
        assert relative(held["hidden_states"][:, :3].flatten(1), out.taps[0]) < 1e-5
        last = held["hidden_states"][:, 3]
        assert relative(target.model.model.norm(last), out.hidden[0]) < 1e-5 and relative(last, out.hidden[0]) > 0.1


def test_states_that_another_makes_meanwhile_are_taken(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other, real = handed(world), handed(world), making._run_target
    first: list[Path] = []

    def run(*given: Any) -> Any:
        monkeypatch.setattr(making, "_run_target", real)
        first.append(write_states(other, world)[0])
        return real(*given)

    monkeypatch.setattr(making, "_run_target", run)
    folder, _ = write_states(mine, world)
    assert first == [folder] and len(list(folder.glob("hs_*.safetensors"))) == 8
    assert [path for path in world.iterdir() if "states-" in path.name] == [folder], "nothing half is left"


def test_other_states_lie_elsewhere_and_need_room(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_states(handed(world), world)[0]
    other = handed(world, "--heads.taps=0,1,2")
    assert write_states(other, world)[0] != folder
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1})())
    with pytest.raises(OSError, match=r"the target's states need 0\.00 GiB in .* where 0\.00 are free"):
        write_states(handed(world, "--heads.taps=0,1,3"), world)
    assert len(list(world.glob("*states-*"))) == 2


def test_only_eagle_on_a_plain_target_is_handed_over(world: Path) -> None:
    with pytest.raises(ValueError, match=r"heads\.kind is medusa: peers train EAGLE-3"):
        handed(world, "--heads.kind=medusa")
    with pytest.raises(ValueError, match="is adapted or quantized here: peers load a target as it stands"):
        handed(world, "--target.adapter=org/adapter")


def test_a_digest_sees_order_masks_and_borders() -> None:
    ids, mask = torch.arange(4), torch.tensor([0, 0, 1, 1]).bool()
    steps = [[(ids, mask)], [(ids + 1, mask)]]
    told = {digest(steps), digest(steps[::-1]), digest([steps[0] + steps[1]]), digest([[(ids, ~mask)], steps[1]])}
    assert len(told) == 4 and digest(steps) == digest([[(ids.int(), mask)], [(ids + 1, mask.long())]])


@pytest.mark.parametrize(
    "name", ["layer.q_proj.weight", "layer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"]
)
def test_weights_of_all_have_one_name(name: str) -> None:
    others = ["verifier_norm.weight", "embed_tokens.weight", "verifier_lm_head.weight", "layers.1.mlp.up_proj.weight"]
    value = torch.ones(1)
    assert list(same_names([(name, value), *((other, value) for other in others)])) == ["layer.q_proj.weight"]
    assert list(same_names([("fc_norms.1.weight", value)])) == ["fc_norm.1.weight"]


def test_the_wanted_shape_is_our_heads_own(world: Path) -> None:
    wanted = contest_of(world).wanted
    assert wanted["weights"] == {
        "fc.weight": [32, 96], "layer.down_proj.weight": [32, 64], "layer.gate_proj.weight": [64, 32],
        "layer.hidden_norm.weight": [32], "layer.input_layernorm.weight": [32], "layer.k_proj.weight": [16, 64],
        "layer.o_proj.weight": [32, 32], "layer.post_attention_layernorm.weight": [32],
        "layer.q_proj.weight": [32, 64], "layer.up_proj.weight": [64, 32], "layer.v_proj.weight": [16, 64],
        "lm_head.weight": [100, 32], "norm.weight": [32],
    }  # fmt: skip
    assert (wanted["dtypes"], wanted["precision"], wanted["taps"], wanted["lookahead"]) == (
        ["float32"], "no", [1, 2, 3], 3,
    )  # fmt: skip


def test_what_peers_execute_imports_nothing_of_ours() -> None:
    own = {"heads", "data", "infer", "train", "tests", "headstart"}
    for path in sorted((HERE / "inside").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not own & {name.split(".")[0] for name in names}, path.name
