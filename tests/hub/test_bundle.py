"""Bundles: target and heads in one folder or repository, which is all that anybody needs to name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import infer
from heads.base import DraftHeads
from heads.hub import locate
from heads.push import push_folder
from heads.store import HeadsFileError
from heads.target import Target, TargetMismatch
from headstart import main
from tests.data.toys import tokenizer
from tests.hub.server import TOKEN, Hub
from tests.hub.world import PROMPT, heads_on, plain_text, save_target, text_model

REPO = "org/bundle"
OF_TARGET = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
FILES = OF_TARGET | {"heads/config.json", "heads/heads.safetensors", "README.md", "custom_generate/generate.py"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``target``, and ``bundle`` of it with heads."""
    folder = tmp_path_factory.mktemp("world")
    target = Target.load(str(save_target(folder / "target")), dtype=torch.float32)
    heads_on(target).save_pretrained(folder / "bundle", bundle=True)
    return folder


@pytest.fixture
def bundle(world: Path, tmp_path: Path) -> Path:
    """A copy to change, with nothing of the original target in reach."""
    return Path(shutil.copytree(world / "bundle", tmp_path / "bundle"))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_is_the_target_with_heads_in_it(world: Path, bundle: Path) -> None:
    assert files(bundle) == FILES - {"README.md"}
    assert str(world) not in (bundle / "config.json").read_text()
    alone = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32)
    wanted = text_model().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in alone.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_name_loads_both(bundle: Path, world: Path, dtype: torch.dtype) -> None:
    loaded = DraftHeads.from_pretrained(bundle, dtype=dtype)
    target = loaded.target
    assert target.dtype == dtype and target.name == str(world / "target"), "known by the name it was trained under"
    out = infer.generate(target, PROMPT, loaded, max_new_tokens=16, do_sample=False)
    assert out.sequences[0].tolist() == plain_text(target) and out.stats.proposed > 0
    assert out.texts == [target.tokenizer().decode(out.sequences[0, len(PROMPT) :])]


def test_generate_takes_its_path(bundle: Path) -> None:
    out = infer.generate(str(bundle), PROMPT, max_new_tokens=16, do_sample=False)
    half = Target.load(str(bundle))
    assert half.dtype == torch.bfloat16 and out.sequences[0].tolist() == plain_text(half)
    assert out.stats.proposed > 0 and out.texts


def test_another_target_in_its_place_is_refused(bundle: Path) -> None:
    text_model(seed=1).save_pretrained(bundle)
    with pytest.raises(TargetMismatch, match="same shape but other weights"):
        infer.generate(str(bundle), PROMPT)


def test_what_a_bundle_cannot_hold_is_refused(world: Path, tmp_path: Path) -> None:
    model: Any = get_peft_model(text_model(), LoraConfig(target_modules=["q_proj"]))
    adapted = Target(model, name="org/adapted")
    with pytest.raises(ValueError, match=r"org/adapted carries an adapter, .* merge it"):
        heads_on(adapted).save_pretrained(tmp_path / "out", bundle=True)
    coded = Target(text_model(), name="org/coded")
    coded.model.config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    with pytest.raises(ValueError, match="org/coded runs code of its own"):
        heads_on(coded).save_pretrained(tmp_path / "out", bundle=True)
    mute = heads_on(Target(text_model(), name=str(tmp_path / "gone")))
    with pytest.raises(ValueError, match=r"no tokenizer is found for .*gone .*: pass tokenizer="):
        mute.save_pretrained(tmp_path / "out", bundle=True)
    with pytest.raises(FileExistsError, match="not empty"):
        mute.save_pretrained(world / "bundle", bundle=True, tokenizer=False)
    assert list(tmp_path.iterdir()) == []
    mute.save_pretrained(tmp_path / "out", bundle=True, tokenizer=False)
    assert not any("tokenizer" in name for name in files(tmp_path / "out"))
    mute.save_pretrained(tmp_path / "more", bundle=True, tokenizer=tokenizer())
    assert (tmp_path / "more" / "tokenizer.json").is_file()


def test_a_run_folder_is_no_bundle(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "bundle" / "heads", tmp_path / "heads")
    with pytest.raises(HeadsFileError, match=r"has no config\.json: it is not a heads folder \(its heads/ is one\)"):
        DraftHeads.from_pretrained(tmp_path)


# on the Hub


def test_a_pushed_bundle_is_all_that_is_needed(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    for name in ("optimizer.pt", ".env", "notes.txt", "pytorch_model.bin"):
        (bundle / name).write_text("HF_TOKEN=secret")
    (bundle / ".git").mkdir()
    pushed = push_folder(bundle, REPO, token=TOKEN)
    assert set(hub.files(REPO)) == FILES and set(pushed.files) == FILES
    assert pushed.left == (".env", ".git/", "notes.txt", "optimizer.pt", "pytorch_model.bin")
    assert hub.files(REPO)["model.safetensors"] == (bundle / "model.safetensors").read_bytes()
    stored = json.loads(hub.files(REPO)["heads/config.json"])
    assert stored["target"]["name"] == REPO, "not a folder of the machine that trained it"
    assert str(tmp_path).encode() not in b"".join(hub.files(REPO).values())

    shutil.rmtree(bundle)
    loaded = DraftHeads.from_pretrained(REPO, dtype=torch.float32, token=TOKEN)
    assert loaded.target.name == REPO
    out = infer.generate(loaded.target, PROMPT, loaded, max_new_tokens=16, do_sample=False)
    assert out.sequences[0].tolist() == plain_text(loaded.target) and out.texts
    cached = files(locate(REPO).bundle or Path())
    assert cached == OF_TARGET | {"heads/config.json", "heads/heads.safetensors"}, "no code, no card"


def test_the_target_is_not_fetched_where_one_is_given(hub: Hub, bundle: Path) -> None:
    push_folder(bundle, REPO, token=TOKEN)
    hub.requests.clear()
    loaded = DraftHeads.from_pretrained(REPO, text_model())
    assert loaded.target.dtype == torch.float32
    assert not any("model.safetensors" in request for request in hub.requests)


def test_pushing_from_python(hub: Hub, world: Path) -> None:
    made = DraftHeads.from_pretrained(world / "bundle", dtype=torch.float32)
    url = made.push_to_hub(REPO, bundle=True, token=TOKEN)
    assert set(hub.files(REPO)) == FILES and "/org/bundle/tree/" in url
    again = made.push_to_hub(REPO, bundle=True, token=TOKEN)
    assert again == url and len(hub.commits(REPO)) == 2


def test_shards_that_are_gone_are_taken_away(hub: Hub, world: Path, tmp_path: Path) -> None:
    target = Target.load(str(world / "target"), dtype=torch.float32)
    made = heads_on(target)
    made.save_pretrained(tmp_path / "one", bundle=True)
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    (tmp_path / "many" / "model.safetensors").unlink()
    target.model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    shards = {name for name in files(tmp_path / "many") if name.startswith("model-")}
    assert len(shards) > 1

    push_folder(tmp_path / "many", REPO, token=TOKEN)
    assert set(hub.files(REPO)) == FILES - {"model.safetensors"} | shards | {"model.safetensors.index.json"}
    hub.files(REPO)["mine.txt"] = b"what its owner put there"
    push_folder(tmp_path / "one", REPO, token=TOKEN)
    assert set(hub.files(REPO)) == FILES | {"mine.txt"}
    loaded = DraftHeads.from_pretrained(REPO, dtype=torch.float32)
    assert torch.equal(loaded.target.output.weight, target.output.weight)
    (tmp_path / "many" / min(shards)).unlink()
    with pytest.raises(ValueError, match=f"has no {min(shards)}: its target is not whole"):
        push_folder(tmp_path / "many", REPO, token=TOKEN)


def test_nothing_is_pushed_over_somebodys_model(hub: Hub, bundle: Path) -> None:
    push_folder(bundle, REPO, token=TOKEN)
    for name in [name for name in hub.files(REPO) if name.startswith(("heads/", "custom"))]:
        del hub.files(REPO)[name]
    with pytest.raises(ValueError, match=r"org/bundle holds config.json, model.safetensors and no heads"):
        push_folder(bundle / "heads", REPO, target_name="org/target", token=TOKEN)
    assert len(hub.commits(REPO)) == 2


def test_the_verbs(hub: Hub, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos.clear()
    heads = heads_on(Target.load(str(world / "target"), dtype=torch.float32))
    heads.save_pretrained(tmp_path / "heads")
    assert main(["bundle", str(tmp_path / "heads"), "--out", str(tmp_path / "out")]) == 0
    assert "and its heads" in capsys.readouterr().out
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert main(["bundle", str(tmp_path / "heads"), "--out", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert DraftHeads.from_pretrained(tmp_path / "half", dtype=torch.float32).config == heads.config
    capsys.readouterr()
    (tmp_path / "out" / "secret.env").write_text("x")
    assert main(["push", str(tmp_path / "out"), REPO, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "would be pushed to org/bundle:\n  config.json\n" in shown
    assert "not uploaded, because it does not belong to heads: secret.env" in shown
    assert hub.requests == []
    assert main(["generate", str(tmp_path / "out"), "hello", "--max-new-tokens", "4"]) == 0


def test_weights_that_are_no_safetensors_are_not_pushed(hub: Hub, bundle: Path) -> None:
    tensors = load_file(bundle / "model.safetensors")
    (bundle / "model.safetensors").unlink()
    torch.save(tensors, bundle / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors: its target is not whole"):
        push_folder(bundle, REPO, token=TOKEN)
    save_file(tensors, bundle / "model.safetensors", metadata={"format": "pt"})
    push_folder(bundle, REPO, token=TOKEN)
    assert "pytorch_model.bin" not in hub.files(REPO)
