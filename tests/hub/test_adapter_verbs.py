"""``eval``, ``bench`` and ``verify`` of heads with an adapter that was not merged: what they measure has it on.

The target says its last token again and again, and so do fresh Medusa heads: all that they draft is right. The heads
below the adapter are these with the adapter's own product taken off: nothing that they draft is.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi

import heads.store
from heads.adapter import save_adapter
from heads.base import DraftHeads
from heads.push import push_folder
from heads.target import Target
from heads.tuned import adapt, base_tensors, factors, without_adapter
from headstart import main
from infer import options
from tests.data import toys
from tests.hub.server import TOKEN, Hub
from tests.hub.world import heads_on, text_model

# what is where: factors that name the heads they belong on, with those in base/, and both in one file
WEIGHTS = {"adapter": "adapter.safetensors", "along": "adapter.safetensors", "whole": "heads.safetensors"}
SHORT = ("--max-new-tokens", "7")
CERTIFY = (*SHORT, "--prompts-count", "1", "--draws", "12", "--top-k", "3")


def repeating() -> Any:
    """A target of which each token asks for itself: its layers add nothing, and its two matrices are one."""
    model = text_model(tie_word_embeddings=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def adapted_heads(target: Target) -> DraftHeads:
    """Fresh heads as other heads and the adapter that makes these of them."""
    made = heads_on(target, "medusa")
    adapt(made, {"rank": 2, "alpha": 4})
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in factors(made).values():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        below, pairs = base_tensors(made), factors(made)  # both share the weights' memory
        for name, down in pairs.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                below[f"{layer}.weight"] -= 4 / 2 * pairs[f"{layer}.lora_B.weight"] @ down  # alpha over rank
    return made.eval()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of ``WEIGHTS``, and ``target``, ``base`` and prompts."""
    folder = tmp_path_factory.mktemp("world")
    repeating().save_pretrained(folder / "target")
    toys.tokenizer().save_pretrained(folder / "target")
    adapted = adapted_heads(Target.load(str(folder / "target"), dtype=torch.float32))
    base = without_adapter(adapted)
    base.save_pretrained(folder / "base")
    save_adapter(adapted, folder / "adapter", str(folder / "base"))
    save_adapter(adapted, folder / "along", None)
    base.save_pretrained(folder / "along" / "base")
    adapted.save_pretrained(folder / "whole")
    toys.write_jsonl(folder / "prompts.jsonl", [{"messages": toys.chat(f"tell me {n}", "no")} for n in range(4)])
    return folder


@pytest.fixture(autouse=True)
def _prompts(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the sample that comes along."""
    monkeypatch.setattr(options, "SAMPLE", world / "prompts.jsonl")


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: heads come without their adapter."""
    read = heads.store.read_weights
    monkeypatch.setattr(heads.store, "merge", without_adapter)
    monkeypatch.setattr(heads.store, "read_weights", lambda *given: without_adapter(read(*given)))


@pytest.fixture
def pushed(hub: Hub, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Each of ``WEIGHTS`` as a repository, beside that of their target, and of the base heads for the one."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("org/target")
    api.upload_folder(repo_id="org/target", folder_path=world / "target")
    push_folder(world / "base", "org/base", target_name="org/target")
    push_folder(world / "adapter", "org/adapter", target_name="org/target", base="org/base")
    push_folder(world / "along", "org/along", target_name="org/target", with_base=True)
    push_folder(world / "whole", "org/whole", target_name="org/target")
    return hub


def report_of(*words: str | Path) -> dict[str, Any]:
    """A verb's report; its certificate may say no of heads that are never wrong."""
    path = Path("report.json").resolve()
    assert main([*map(str, words), "--json", str(path)]) in (0, 1)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def accepted(place: str | Path) -> tuple[int, int]:
    """Tokens proposed and accepted in ``eval``; six behind the first, two of three drafted, for each of two prompts."""
    report = report_of("eval", place, *SHORT, "--dtype", "float32", "--rows", "--count", "2")
    block = report["budgets"]["chain 2"]
    return block["proposed"], block["accepted"]


def digest(world: Path, name: str) -> str:
    return hashlib.sha256((world / name / WEIGHTS[name]).read_bytes()).hexdigest()


ADAPTED, BELOW = (8, 8), (18, 0)


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("name", WEIGHTS)
def test_eval_of_a_folder(name: str, world: Path) -> None:
    assert accepted(world / name) == ADAPTED


@pytest.mark.usefixtures("_here", "left_out")
@pytest.mark.parametrize("name", WEIGHTS)
def test_an_adapter_that_is_left_out_shows(name: str, world: Path) -> None:
    assert accepted(world / name) == BELOW


def test_eval_of_repositories(pushed: Hub, world: Path) -> None:
    for name in WEIGHTS:
        assert accepted(f"org/{name}") == ADAPTED
    assert accepted("org/base") == BELOW


def test_bench(pushed: Hub, world: Path) -> None:
    for name in WEIGHTS:
        for place in (world / name, f"org/{name}"):
            words = ("--dtype", "float32", "--count", "1", "--warmup", "1", "--draft", "chain:2")
            report = report_of("bench", place, *SHORT, *words)
            assert report["equality"]["identical"] and report["tokens_per_round"]["value"] == 3.0
            assert report["heads_sha256"] == digest(world, name)


def test_bench_beside_other_drafts(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    words = ("--dtype", "float32", "--count", "1", "--warmup", "1", "--drafts", "heads", "--theirs", "none")
    report = report_of("bench", world / "adapter", *SHORT, *words, "--control", "fixed")
    figures = report["temperatures"]["0"]["ways"]["heads"]["all"]
    assert figures["identical"] == 1 and figures["tokens_per_round"] == 3.0


def rejected(certificate: dict[str, Any]) -> float:
    share: float = certificate["sampled"]["drafts"]["chain 2"]["rejected"]
    return share


@pytest.mark.usefixtures("_here")
def test_verify_of_folders(world: Path) -> None:
    for name in ("adapter", "whole"):
        certificate = report_of("verify", world / name, *CERTIFY)
        assert certificate["greedy"]["float32"]["identical"] and certificate["greedy"]["bfloat16"]["passed"]
        assert all(block["passed"] for block in certificate["sampled"]["drafts"].values())
        assert rejected(certificate) == 0, "they draw from the target's own law"
        assert certificate["heads"]["sha256"] == digest(world, name)
        assert (certificate["heads"]["form"], certificate["heads"]["commit"]) == ("headstart", None)
        assert json.loads((world / name / "certificate.json").read_text())["heads"] == certificate["heads"]


@pytest.mark.usefixtures("_here", "left_out")
def test_a_certificate_without_the_adapter_is_another(world: Path, tmp_path: Path) -> None:
    certificate = report_of("verify", world / "adapter", *CERTIFY, "--certificate", tmp_path / "c.json")
    assert rejected(certificate) > 0.2


def test_verify_of_a_repository(pushed: Hub, world: Path) -> None:
    certificate = report_of("verify", "org/adapter", *CERTIFY)
    assert rejected(certificate) == 0 and certificate["greedy"]["float32"]["identical"]
    assert certificate["heads"]["sha256"] == digest(world, "adapter")
    assert certificate["heads"]["commit"] == pushed.commits("org/adapter")[-1].oid
