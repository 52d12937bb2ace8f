"""Heads folders that are not whole, or are for another target: each an error that says what; nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import DraftHeads
from heads.config import ConfigError
from heads.identity import TargetMismatch
from heads.kinds import build, make_config
from heads.store import CONFIG, WEIGHTS, HeadsFileError
from heads.target import Target
from tests.heads.small import small_heads, small_target
from tests.tiny import tiny_model


def load(folder: Path, **options: Any) -> DraftHeads:
    return DraftHeads.from_pretrained(folder, small_target(), **options)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a folder."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def reconfigure(folder: Path, **values: Any) -> None:
    stored = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(stored | values))


# files that are not whole


def test_missing_renamed_extra_and_misshapen_tensors_are_all_listed(saved: tuple[DraftHeads, Path]) -> None:
    _, folder = saved
    names = sorted(name for name in load_file(folder / WEIGHTS) if name != "target_ids")
    dropped, renamed, reshaped = names[0], names[1], names[2]

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[dropped]
        tensors[renamed + "_old"] = tensors.pop(renamed)
        tensors["base_model.lm_head.weight"] = torch.zeros(2)
        tensors[reshaped] = tensors[reshaped][:1].clone()

    rewrite(folder, change)
    with pytest.raises(HeadsFileError) as caught:
        load(folder)
    message = str(caught.value)
    assert f"missing {dropped}, {renamed}" in message
    assert "unexpected " in message and renamed + "_old" in message and "base_model.lm_head.weight" in message
    assert f"{reshaped} is (1" in message and "is expected" in message
    assert str(folder / WEIGHTS) in message


@pytest.mark.parametrize("change", ["missing", "renamed", "extra", "misshapen"])
def test_each_fault_alone_is_refused(change: str, saved: tuple[DraftHeads, Path]) -> None:
    _, folder = saved
    name = min(load_file(folder / WEIGHTS))
    edits: dict[str, Callable[[dict[str, Tensor]], object]] = {
        "missing": lambda tensors: tensors.pop(name),
        "renamed": lambda tensors: tensors.update({name + "x": tensors.pop(name)}),
        "extra": lambda tensors: tensors.update({"bias": torch.zeros(1)}),
        "misshapen": lambda tensors: tensors.update({name: torch.zeros(3, 3, 3)}),
    }
    rewrite(folder, edits[change])
    with pytest.raises(HeadsFileError, match="does not hold the weights its config describes"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_cut_short_is_refused(keep: int, saved: tuple[DraftHeads, Path]) -> None:
    _, folder = saved
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:keep])
    with pytest.raises(HeadsFileError, match="not a whole safetensors file"):
        load(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(HeadsFileError, match=r"has no config\.json: it is not a heads folder"):
        load(tmp_path)
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(HeadsFileError, match=r"heads\.safetensors is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"kind": "eagle",', "is not valid JSON"), ("[1, 2]", "must hold a JSON object, not a list"), ("\x00", "JSON")],
)
def test_a_broken_config_is_refused(content: str, message: str, tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(content)
    with pytest.raises(HeadsFileError, match=message):
        load(tmp_path)


def test_a_config_that_is_no_text_is_refused(tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HeadsFileError, match="is not valid JSON"):
        load(tmp_path)


def test_unknown_and_missing_settings_are_refused(tmp_path: Path) -> None:
    small_heads("eagle", small_target()).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / CONFIG).read_text())
    reconfigure(tmp_path, look_ahead=3)
    with pytest.raises(
        ConfigError, match=r"config\.json has the unknown key 'look_ahead' — did you mean 'lookahead'\?"
    ):
        load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({key: value for key, value in stored.items() if key != "taps"}))
    with pytest.raises(ConfigError, match="lacks taps"):
        load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(stored | {"options": stored["options"] | {"rope_thta": 5e5}}))
    with pytest.raises(ConfigError, match="unknown key 'rope_thta' — did you mean 'rope_theta'"):
        load(tmp_path)
    short = {key: value for key, value in stored["options"].items() if key != "head_dim"}
    (tmp_path / CONFIG).write_text(json.dumps(stored | {"options": short}))
    with pytest.raises(ConfigError, match="options of eagle heads lack head_dim"):
        load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(stored | {"kind": "eagel"}))
    with pytest.raises(ConfigError, match="unknown kind of heads 'eagel' — did you mean 'eagle'"):
        load(tmp_path)


def test_settings_that_do_not_fit_the_weights_are_refused(tmp_path: Path) -> None:
    small_heads("medusa", small_target(), lookahead=3).save_pretrained(tmp_path)
    reconfigure(tmp_path, lookahead=4)
    with pytest.raises(HeadsFileError, match=r"missing blocks\.3\.0\.linear\.bias, blocks\.3\.0\.linear\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("lost", ["unset", "zero", "unsorted", "beyond", "gone"])
def test_a_lost_draft_vocabulary_is_refused(lost: str, tmp_path: Path) -> None:
    """Without its map draft ids would be taken for target ids."""
    small_heads("eagle", small_target(), draft_vocab=3).save_pretrained(tmp_path)
    ids = {"unset": [-1, -1, -1], "zero": [0, 0, 0], "unsorted": [5, 2, 7], "beyond": [2, 5, 64]}.get(lost)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["target_ids"]
        if ids is not None:
            tensors["target_ids"] = torch.tensor(ids)

    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match="missing target_ids" if ids is None else "distinct sorted ids below 64"):
        load(tmp_path)


def test_a_draft_vocabulary_that_was_never_set_is_not_saved(tmp_path: Path) -> None:
    target = small_target()
    made = build(make_config("eagle", target, taps=(1, 2, 3), draft_vocab_size=8), target)
    with pytest.raises(ValueError, match="distinct sorted ids"):
        made.save_pretrained(tmp_path / "heads")
    assert not (tmp_path / "heads" / WEIGHTS).exists()


def test_sharded_weights_are_not_saved_empty(tmp_path: Path) -> None:
    """A sharded weight outside its gathering has no values: nothing is written."""
    made = small_heads("medusa", small_target())
    next(made.parameters()).data = torch.empty(0)
    with pytest.raises(HeadsFileError, match=r"blocks\.0\.0\.linear\.weight is \(0,\) where"):
        made.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


# the wrong target


def test_heads_for_another_target_are_refused(tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    wide = Target(tiny_model("llama", hidden_size=64, head_dim=16), name="org/wide")
    with pytest.raises(TargetMismatch) as caught:
        DraftHeads.from_pretrained(tmp_path, wide)
    assert all(part in str(caught.value) for part in ("hidden_size 32 there, 64 here", "tiny/llama", "org/wide"))
    with pytest.raises(TargetMismatch, match="tiny/llama, not for org/wide: hidden_size 32 there, 64 here"):
        DraftHeads.from_pretrained(tmp_path, wide, allow_mismatch=True)  # on this no weight could be tried
    other = Target(tiny_model("llama", seed=1), name="org/other")
    with pytest.raises(TargetMismatch, match="same shape but other weights"):
        DraftHeads.from_pretrained(tmp_path, other)
    assert DraftHeads.from_pretrained(tmp_path, other, allow_mismatch=True).target is other
    shallow = Target(tiny_model("llama", layers=3), name="org/shallow")
    with pytest.raises(TargetMismatch, match="org/shallow has 0 to 3"):
        DraftHeads.from_pretrained(tmp_path, shallow, allow_mismatch=True)
    moved = Target(tiny_model("llama"), name="/another/place")
    assert DraftHeads.from_pretrained(tmp_path, moved).config.target.name == "tiny/llama"
