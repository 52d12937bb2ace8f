"""Exports that a format cannot hold are refused with the reason; folders are written whole, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import heads.formats.folder as folder_module
from heads.formats import FORMATS, FormatError, export_heads
from heads.target import Target
from tests.heads.formats.cases import BLOCK, MEDUSA, OTHER, USUAL
from tests.heads.formats.engine import stored
from tests.heads.small import logits_of, small_heads, small_target
from tests.tiny import tiny_model

REFUSED: dict[str, tuple[dict[str, Any], int, str, str | None, str]] = {
    "other taps": (OTHER, 8, "eagle3", None, r"taps \[1, 3, 7\] .* say --engine vllm or --engine sglang"),
    "shallow": ({"kind": "eagle", "taps": (2, 3, 4)}, 6, "eagle3", None, "target of 6 layers are not what the engines"),
    "last state": ({"kind": "eagle", "taps": (1, 3, 8)}, 8, "eagle3", "vllm", "between 1 and 7"),
    "embedding": ({"kind": "eagle", "taps": (0, 3, 5)}, 8, "speculators", None, "between 1 and 7"),
    "order": ({"kind": "eagle", "taps": (4, 2, 5)}, 8, "eagle3", "vllm", "ascending order"),
    "twice": ({"kind": "eagle", "taps": (2, 2, 5)}, 8, "eagle3", "vllm", "distinct"),
    "one tap": ({"kind": "eagle", "taps": (4,)}, 8, "eagle3", "sglang", "leaves out fc"),
    "speculators in sglang": (USUAL, 8, "speculators", "sglang", "sglang does not read the speculators format"),
    "medusa in sglang": (MEDUSA, 8, "medusa", "sglang", "sglang does not read the medusa format"),
    "medusa map": (MEDUSA | {"draft_vocab": 20}, 8, "medusa", None, "20 has no place .* --engine vllm"),
    "medusa taps": (MEDUSA | {"taps": (4,)}, 8, "medusa", None, r"taps \[4\] have no Medusa form"),
    "eagle as medusa": (USUAL, 8, "medusa", None, "heads of kind eagle have no medusa form"),
    "medusa as eagle3": (MEDUSA, 8, "eagle3", None, "heads of kind medusa have no eagle3 form"),
    "medusa as speculators": (MEDUSA, 8, "speculators", None, "heads of kind medusa have no speculators form"),
    "eagle as dflash": (USUAL, 8, "dflash", None, "heads of kind eagle have no dflash form"),
    "block as eagle3": (BLOCK | {"taps": (2, 4, 5)}, 8, "eagle3", None, "heads of kind block have no eagle3 form"),
    "shifted": (BLOCK | {"taps": (2, 4, 5), "shifted": True}, 8, "dflash", None, "shifted True have no dflash form"),
    "bias": (BLOCK | {"taps": (2, 4, 5), "markov_rank": 4}, 8, "dflash", None, "markov_rank 4 have no dflash form"),
    "own output": (BLOCK | {"taps": (2, 4), "own_output": True}, 8, "dflash", None, "own_output True have no dflash"),
    "confidence": (BLOCK | {"taps": (2, 4), "confidence": True}, 8, "dflash", None, "confidence True have no dflash"),
    "block map": (BLOCK | {"taps": (2, 4), "draft_vocab": 20}, 8, "dflash", None, "of 20 has no place in the dflash"),
    "block last": (BLOCK | {"taps": (2, 8)}, 8, "dflash", None, "between 1 and 7"),
    "unshifted": (BLOCK | {"taps": (2, 4)}, 8, "dspark", None, "shifted False have no dspark form"),
    "no bias": (BLOCK | {"taps": (2, 4), "shifted": True}, 8, "dspark", None, "markov_rank 0 have no dspark form"),
    "no matrix": ({"kind": "block", "taps": (2, 4), "draft_vocab": 20}, 8, "dspark", None, "a matrix of its own there"),
    "medusa as dspark": (MEDUSA, 8, "dspark", None, "heads of kind medusa have no dspark form"),
    "engine": (USUAL, 8, "eagle3", "tgi", "unknown engine 'tgi'"),
    "format": (USUAL, 8, "eagle9", None, "unknown format 'eagle9'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_format_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    options, layers, to, engine, message = REFUSED[name]
    made = small_heads(target=small_target(layers=layers), **options)
    with pytest.raises(FormatError, match=message):
        export_heads(made, to, tmp_path / "out", engine=engine)
    assert list(tmp_path.iterdir()) == []


def test_seven_layers_are_enough_for_one_folder(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=7), kind="eagle", taps=(2, 3, 4))
    assert export_heads(made, "eagle3", tmp_path / "out").engines == ("vllm", "sglang")
    assert "eagle_config" not in stored(tmp_path / "out")[0]


def test_an_embedding_of_another_size_has_no_speculators_form(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=8)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:60].clone())
    model.lm_head.out_features = 60
    made = small_heads(target=Target(model), **USUAL)
    with pytest.raises(FormatError, match="embeds 64 tokens and answers 60"):
        export_heads(made, "speculators", tmp_path / "out")


def test_targets_that_scale_what_vllm_leaves_bare_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = Target(tiny_model("gemma2", layers=8))
    shifted: dict[str, Any] = {"kind": "block", "taps": (2, 4), "markov_rank": 4}
    for to, options in (("dflash", BLOCK | {"taps": (2, 4)}), ("dspark", shifted)):
        with pytest.raises(FormatError, match="scales its embeddings"):
            export_heads(small_heads(target=gemma, **options), to, tmp_path / "out")
    made = small_heads(target=small_target(layers=8), **shifted)
    monkeypatch.setattr(Target, "transform", lambda self, logits: logits / 2)
    with pytest.raises(FormatError, match="caps or scales its logits"):
        export_heads(made, "dspark", tmp_path / "out")


# folders


def test_a_folder_with_files_is_never_written_to(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **USUAL)
    (tmp_path / "out").mkdir()
    export_heads(made, "eagle3", tmp_path / "out")  # an empty one is as good as none
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for place in (tmp_path / "out", tmp_path / "out" / "config.json"):
        with pytest.raises(FileExistsError, match="not empty: name a new folder"):
            export_heads(made, "eagle3", place)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensors: Any, path: Path, **kwargs: Any) -> None:
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "save_file", refuse)
    with pytest.raises(OSError, match="No space left"):
        export_heads(small_heads(target=small_target(layers=8), **USUAL), "eagle3", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    """A server often runs as somebody else than who trained."""
    export_heads(small_heads(target=small_target(layers=8), **USUAL), "eagle3", tmp_path / "out")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1 and (tmp_path / "out").stat().st_mode & 0o055 == 0o055


def test_an_export_changes_nothing_in_the_heads(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **USUAL)
    before = logits_of(made)
    export_heads(made, "eagle3", tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(logits_of(made), before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_every_format_says_what_it_is() -> None:
    assert all(format.what for format in FORMATS.values()) and {"eagle1", "eagle3", "medusa", "speculators"} <= set(
        FORMATS
    )
