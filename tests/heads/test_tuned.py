"""Heads adapted by LoRA: nothing changes at first, only factors learn, merged heads say the same and are ordinary."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear

import headstart
from heads import ConfigError, DraftHeads, TargetMismatch
from heads.adapter import load_adapter, save_adapter
from heads.formats import FormatError, export_heads
from heads.kinds import KINDS, build
from heads.layout import CONFIG_BYTES
from heads.store import HeadsFileError
from heads.target import Target
from heads.tuned import adapt, base_tensors, factors, lora_settings, merge, start_from
from tests.heads.small import batch_of, logits_of, random_ids, relative, small_heads, small_target, soft_ce
from tests.tiny import tiny_model

ORDINARY = [kind for kind in KINDS if kind != "mtp"]  # which is low-rank factors itself


def adapted(kind: str, **lora: Any) -> DraftHeads:
    """Heads with factors on them that are not zero."""
    heads = small_heads(kind, small_target(), draft_vocab=20)
    adapt(heads, {"rank": 2, "alpha": 4} | lora)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in factors(heads).values():
            tensor.copy_(torch.randn(tensor.shape, generator=random, dtype=tensor.dtype) * 0.3)
    return heads.eval()


@pytest.mark.parametrize("kind", ORDINARY)
def test_fresh_factors_change_nothing_and_they_alone_learn(kind: str) -> None:
    target = small_target()
    heads = small_heads(kind, target, draft_vocab=20)
    before, tensors = logits_of(heads), {name: value.clone() for name, value in heads.state_dict().items()}
    adapt(heads, {})
    assert relative(logits_of(heads), before) < 1e-12
    trained = {name for name, parameter in heads.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    optimizer = torch.optim.SGD([p for p in heads.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        heads.loss(batch_of(target, heads.config.taps, random_ids(14)), soft_ce).total.backward()
        optimizer.step()
    assert relative(logits_of(heads), before) > 1e-6
    assert all(torch.equal(value, tensors[name]) for name, value in base_tensors(heads).items())
    assert base_tensors(heads).keys() == tensors.keys()


@pytest.mark.parametrize("kind", ORDINARY)
def test_merged_heads_are_ordinary_and_say_the_same(kind: str, tmp_path: Path) -> None:
    heads = adapted(kind)
    plain = small_heads(kind, heads.target, draft_vocab=20)
    merged = merge(heads)
    assert merged.config == plain.config and merged.state_dict().keys() == plain.state_dict().keys()
    said = logits_of(heads)
    assert relative(logits_of(merged), said) < 1e-12
    assert relative(logits_of(plain), said) > 1e-3, "the factors do something"
    merged.save_pretrained(tmp_path)
    assert "lora" not in json.loads((tmp_path / "config.json").read_text())
    assert relative(logits_of(DraftHeads.from_pretrained(tmp_path, heads.target)), said) < 1e-12
    assert merge(merged) is merged


def test_heads_that_are_an_adapter_themselves_are_refused() -> None:
    heads = small_heads("mtp", small_target())
    before = heads.config
    with pytest.raises(
        ConfigError, match=r"mtp heads are an adapter themselves: train them further without heads\.lora"
    ):
        adapt(heads, {})
    assert heads.config is before
    config = replace(before, lora={"rank": 2, "alpha": 4.0, "modules": "all"})
    with pytest.raises(ConfigError, match="an adapter themselves"):
        build(config, small_target())


@pytest.mark.parametrize("mistake", [0.0, 0.5, -1.0], ids=["left out", "not scaled by alpha/rank", "turned round"])
def test_mistakes_in_merging_show(mistake: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of rank 2 and alpha 4 are scaled by 2: without that they weigh half."""
    heads = adapted("eagle")
    said = logits_of(heads)
    right = LoraLinear.get_delta_weight
    monkeypatch.setattr(LoraLinear, "get_delta_weight", lambda self, name: mistake * right(self, name))
    assert relative(logits_of(merge(heads)), said) > 1e-3


def test_heads_with_their_factors_are_stored_and_read_strictly(tmp_path: Path) -> None:
    heads = adapted("eagle")
    heads.save_pretrained(tmp_path)
    found = DraftHeads.from_pretrained(tmp_path, heads.target)
    assert found.config == heads.config and found.config.lora == {"rank": 2, "alpha": 4, "modules": "all"}
    assert torch.equal(logits_of(found), logits_of(heads))
    with pytest.raises(FormatError, match="merge it first"):
        export_heads(found, "eagle3", tmp_path / "out")
    with pytest.raises(ConfigError, match="have an adapter on them already: merge it first"):
        adapt(found, {})


def test_an_adapter_alone_and_the_heads_it_belongs_on(tmp_path: Path) -> None:
    base = small_heads("eagle", small_target(), draft_vocab=20)
    base.save_pretrained(tmp_path / "base")
    heads = adapted("eagle")
    save_adapter(heads, tmp_path / "adapter", str(tmp_path / "base"))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == ["adapter.json", "adapter.safetensors"]
    said = logits_of(heads)
    assert torch.equal(logits_of(load_adapter(tmp_path / "adapter", heads.target)), said)
    merged = DraftHeads.from_pretrained(tmp_path / "adapter", heads.target)
    assert merged.config.lora is None and relative(logits_of(merged), said) < 1e-12

    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_adapter(tmp_path / "adapter", heads.target)
    moved = load_adapter(tmp_path / "adapter", heads.target, base=str(tmp_path / "moved"))
    assert torch.equal(logits_of(moved), said)
    small_heads("eagle", small_target(), draft_vocab=20, seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(HeadsFileError, match=r"other are not the heads that .*adapter was trained on"):
        load_adapter(tmp_path / "adapter", heads.target, base=str(tmp_path / "other"))
    with pytest.raises(TargetMismatch, match="same shape but other weights"):
        load_adapter(tmp_path / "adapter", Target(tiny_model("llama", seed=1)))


def test_a_broken_record_is_refused_by_name(tmp_path: Path) -> None:
    small_heads("eagle", small_target(), draft_vocab=20).save_pretrained(tmp_path / "base")
    save_adapter(adapted("eagle"), tmp_path / "adapter", str(tmp_path / "base"))
    path, target = tmp_path / "adapter" / "adapter.json", small_target()
    record = json.loads(path.read_text())
    shutil.copytree(tmp_path / "adapter", tmp_path / "second")
    (tmp_path / "second" / "adapter.json").write_text(json.dumps(record | {"base": str(tmp_path / "adapter")}))
    for broken, message in (
        ({}, "is not an adapter's record: it has no 'heads'"),
        ([], "is not an adapter's record"),
        (record | {"base_dtype": "nn"}, "is not an adapter's record: base_dtype is 'nn', not one of float64, "),
        (record | {"base_dtype": []}, r"is not an adapter's record: base_dtype is \[\]"),
        (record | {"base": str(tmp_path / "adapter")}, "names no heads to be put on"),
        (record | {"base": str(tmp_path / "second")}, "belongs on .*second, which is an adapter too: merge that"),
        (record | {"heads": {k: v for k, v in record["heads"].items() if k != "lora"}}, "names no factors"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(HeadsFileError, match=message):
            load_adapter(tmp_path / "adapter", target)
    for content in (b"\xff\xfe", b"[" * 200_000):  # also nested deeper than the reader can go
        path.write_bytes(content)
        with pytest.raises(HeadsFileError, match="is not an adapter's record"):
            load_adapter(tmp_path / "adapter", target)
    os.truncate(path, CONFIG_BYTES + 1)
    with pytest.raises(HeadsFileError, match="larger than 16 MiB: it is no adapter's record"):
        load_adapter(tmp_path / "adapter", target)
    path.write_text(json.dumps(record))
    (tmp_path / "adapter" / "adapter.safetensors").unlink()
    with pytest.raises(HeadsFileError, match=r"adapter\.safetensors is missing"):
        load_adapter(tmp_path / "adapter", target)


def test_the_verb_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()
    small_heads("medusa", target, draft_vocab=20).save_pretrained(tmp_path / "base")
    heads = adapted("medusa")
    save_adapter(heads, tmp_path / "adapter", str(tmp_path / "base"))
    monkeypatch.setattr(Target, "load", lambda *_, **__: target)
    command = ["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "merged")]
    assert headstart.main(command) == 0
    found = DraftHeads.from_pretrained(tmp_path / "merged", target)
    assert relative(logits_of(found), logits_of(heads)) < 1e-12
    assert headstart.main(command) == 2  # a folder that is there is not written into


def test_layers_are_chosen_by_name() -> None:
    heads = adapted("eagle", modules=["q_proj", "v_proj"])
    assert {name.rsplit(".lora_")[0] for name in factors(heads)} == {"layer.q_proj", "layer.v_proj"}
    assert {tuple(value.shape) for name, value in factors(heads).items() if "lora_A" in name} == {(2, 64)}
    with pytest.raises(ConfigError, match=r"lora\.modules \['nothing'\] does not fit; layers are fc, layer\.q_proj"):
        adapted("eagle", modules=["nothing"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rnk": 2}, "unknown key 'rnk' — did you mean 'rank'"),
        ({"rank": 0}, r"lora\.rank must be 1 or more, not 0"),
        ({"alpha": 0}, r"lora\.alpha must be above 0"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora_settings(given)


def test_heads_of_another_target_are_taken_only_when_that_is_meant(tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    tuned = Target(tiny_model("llama", seed=1), name="tiny/tuned")
    with pytest.raises(TargetMismatch, match=r"same shape but other weights.*set heads\.allow_mismatch to true"):
        start_from(str(tmp_path), tuned, torch.float64, allow_mismatch=False)
    heads = start_from(str(tmp_path), tuned, torch.float64, allow_mismatch=True)
    assert heads.config.target == tuned.identity()
