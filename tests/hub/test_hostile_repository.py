"""Repositories and bundles that reach for files of this machine, or hold code: refused, nothing is run or written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.base import DraftHeads
from heads.hub import locate
from heads.push import push_folder
from heads.target import Target
from headstart import main
from tests.hub.server import TOKEN, Hub
from tests.hub.world import heads_on, save_target

REPO = "org/bundle"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A whole one."""
    target = Target.load(str(save_target(tmp_path / "target")), dtype=torch.float32)
    heads_on(target).save_pretrained(tmp_path / "bundle", bundle=True)
    return tmp_path / "bundle"


def reach_out(bundle: Path, place: str) -> None:
    """The weights lie outside, and the index leads to them."""
    names = load_file(bundle / "model.safetensors")
    (bundle / "model.safetensors").rename(bundle.parent / "model-1-of-1.safetensors")
    (bundle / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, place)}))


@pytest.mark.parametrize("place", ["../model-1-of-1.safetensors", "{}/model-1-of-1.safetensors"])
def test_a_bundles_index_leads_nowhere_else(place: str, bundle: Path) -> None:
    reach_out(bundle, place.format(bundle.parent))
    with pytest.raises(ValueError, match="names what is no safetensors file of its folder"):
        DraftHeads.from_pretrained(bundle)


def test_a_bundle_on_the_hub_leads_nowhere_else(hub: Hub, bundle: Path) -> None:
    push_folder(bundle, REPO, token=TOKEN)
    reach_out(bundle, "../../../../model-1-of-1.safetensors")
    del hub.files(REPO)["model.safetensors"]
    hub.files(REPO)[INDEX] = (bundle / INDEX).read_bytes()
    with pytest.raises(ValueError, match="names what is no safetensors file of its folder"):
        DraftHeads.from_pretrained(REPO)


def test_a_bundles_target_is_no_pickle(bundle: Path) -> None:
    torch.save(load_file(bundle / "model.safetensors"), bundle / "pytorch_model.bin")
    (bundle / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors: .*weights must be safetensors"):
        DraftHeads.from_pretrained(bundle)


@pytest.mark.parametrize("climb", ["model-/../../../../../stolen-of-1.safetensors", "/model-1-of-1.safetensors"])
def test_a_repositorys_file_names_lead_nowhere_else(
    climb: str, hub: Hub, bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    push_folder(bundle, REPO, token=TOKEN)
    hub.files(REPO)[climb] = b"written where nobody asked for it"
    before = {path for path in bundle.parent.parent.rglob("*") if "cache" not in path.parts}
    status = main(["generate", REPO, "hello", "--max-new-tokens", "4"])
    said = capfd.readouterr().err
    assert "Traceback" not in said and (status == 0 or said.splitlines()[-1].startswith("error: "))
    assert {path for path in bundle.parent.parent.rglob("*") if "cache" not in path.parts} == before
    assert not any(path.name.startswith("stolen") for path in bundle.parent.rglob("*"))


def test_code_that_comes_along_is_not_run(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    """Modelling code that a bundle's config asks for, and another file for plain transformers."""
    marker = tmp_path / "was-run"
    push_folder(bundle, REPO, token=TOKEN)
    evil = f"open({str(marker)!r}, 'w')\n".encode()
    config: dict[str, Any] = json.loads(hub.files(REPO)["config.json"])
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Model", "AutoConfig": "modeling_evil.Config"}}
    hub.files(REPO)["config.json"] = json.dumps(config).encode()
    for name in ("modeling_evil.py", "custom_generate/generate.py", "heads/__init__.py", "tokenization_evil.py"):
        hub.files(REPO)[name] = evil
    loaded = DraftHeads.from_pretrained(REPO, dtype=torch.float32)
    assert loaded.target.tokenizer()("a")["input_ids"] and not marker.exists()
    assert not list(locate(REPO).folder.rglob("*.py"))
