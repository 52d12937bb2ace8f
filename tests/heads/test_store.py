"""Heads on disk: what was saved is what loads, here and in a new process, and a full disk leaves what was there."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import heads.store as store
from heads.base import DraftHeads
from heads.store import CONFIG, WEIGHTS
from heads.target import Target
from tests.heads.small import STORED, batch_of, logits_of, random_ids, small_heads, small_target, soft_ce
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def load(folder: Path, **options: Any) -> DraftHeads:
    return DraftHeads.from_pretrained(folder, small_target(), **options)


# round trips


def test_a_round_trip_is_bit_equal(saved: tuple[DraftHeads, Path]) -> None:
    made, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    back = load(folder)
    assert type(back) is type(made) and back.config == made.config and not back.training
    assert back.state_dict().keys() == made.state_dict().keys()
    for name, value in made.state_dict().items():
        assert torch.equal(back.state_dict()[name], value) and back.state_dict()[name].dtype == value.dtype
    assert torch.equal(logits_of(back), logits_of(made))


SCRIPT = """
import sys, torch
from heads.base import DraftHeads
from tests.heads.small import logits_of
torch.set_num_threads(1)
heads = DraftHeads.from_pretrained(sys.argv[1], dtype=torch.float64)
torch.save((heads.state_dict(), logits_of(heads)), sys.argv[2])
"""


def test_a_new_process_finds_the_target_and_drafts_the_same_after_a_training_step(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), dtype=torch.float64)
    made = small_heads("eagle", target, draft_vocab=20, norm_output=True)
    before = logits_of(made)
    report = made.loss(batch_of(target, made.config.taps, random_ids(12)), soft_ce)
    (report.total / report.count).backward()
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    assert not torch.equal(logits_of(made), before)
    made.save_pretrained(tmp_path / "heads")
    assert json.loads((tmp_path / "heads" / CONFIG).read_text())["format_version"] == 1, "of the layout"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "heads", tmp_path / "out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    state, logits = torch.load(tmp_path / "out")
    assert all(torch.equal(state[name], value) for name, value in made.state_dict().items())
    assert torch.equal(logits, logits_of(made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_load_in_the_dtype_of_the_target_or_as_asked(dtype: torch.dtype, tmp_path: Path) -> None:
    made = small_heads("eagle", small_target(), draft_vocab=20)
    made.save_pretrained(tmp_path)
    for back in (load(tmp_path, dtype=dtype), DraftHeads.from_pretrained(tmp_path, small_target(dtype=dtype))):
        for name, value in made.state_dict().items():
            wanted = value if name == "target_ids" else value.to(dtype)
            assert torch.equal(back.state_dict()[name], wanted)


def test_a_model_will_do_for_a_target(tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    assert DraftHeads.from_pretrained(str(tmp_path), tiny_model("llama")).target.num_layers == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", STORED)
def test_the_file_holds_the_heads_and_nothing_of_the_target(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = small_heads(target=small_target(dtype=dtype), **STORED[case])
    made.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert tensors.keys() == made.state_dict().keys()
    assert all(tensors[name].dtype == dtype for name, _ in made.named_parameters())
    # five percent over the weights, and here a fixed header that is small beside real ones
    payload = sum(value.numel() * value.element_size() for value in made.state_dict().values())
    header = 8 + int.from_bytes((tmp_path / WEIGHTS).read_bytes()[:8], "little")
    assert (tmp_path / WEIGHTS).stat().st_size == payload + header
    assert header < 4096
    theirs = dict(made.target.model.state_dict())
    assert theirs.keys() & tensors.keys() <= {"lm_head.weight"}, "only eagle's own, which is trained, has that name"
    for name, value in tensors.items():
        assert not any(value.shape == other.shape and torch.equal(value, other) for other in theirs.values()), name


def test_a_shared_output_matrix_is_not_stored_and_sizes_are_those_of_the_parameters(tmp_path: Path) -> None:
    target = Target(tiny_model("llama", vocab=4096, dtype=torch.float32))
    made = small_heads("medusa", target, lookahead=2, layers=1)
    made.save_pretrained(tmp_path)
    size = (tmp_path / WEIGHTS).stat().st_size
    parameters = sum(p.numel() for p in made.parameters())
    assert parameters == 2 * (32 * 32 + 32)
    assert size <= parameters * 4 * 1.05


# a full disk


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    """The system refuses to write files beyond ``limit`` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def refusing(module: Any, name: str, monkeypatch: pytest.MonkeyPatch, at_call: int = 1) -> Iterator[None]:
    """One function writes something, or nothing, and then raises what a full disk raises."""
    original, calls = getattr(module, name), [0]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != at_call:
            return original(*args, **kwargs)
        if name == "save_file":
            Path(args[1]).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        yield


FULL: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "for real": lambda patch: small_files_only(3000),
    "weights": lambda patch: refusing(store, "save_file", patch),
    "config": lambda patch: refusing(Path, "write_text", patch),
    "first rename": lambda patch: refusing(os, "replace", patch),
    "second rename": lambda patch: refusing(os, "replace", patch, at_call=2),
}


@pytest.mark.parametrize("how", FULL)
@pytest.mark.parametrize("case", STORED)
def test_a_full_disk_leaves_the_folder_as_it_was(
    how: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small_heads(target=small_target(), seed=1, **STORED[case])
    second = small_heads(target=small_target(), seed=2, **STORED[case])
    second.set_draft_vocabulary(first.target_ids) if case == "eagle" else None
    folder = tmp_path / "heads"
    first.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with FULL[how](monkeypatch), pytest.raises(OSError):
        second.save_pretrained(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() == before.keys(), "nothing half written is left"
    if how != "second rename":  # then the new weights are whole and in place, under a config that says the same
        assert after == before
    back, wanted = load(folder), second if how == "second rename" else first
    assert all(torch.equal(back.state_dict()[name], value) for name, value in wanted.state_dict().items())
    second.save_pretrained(folder)
    assert torch.equal(logits_of(load(folder)), logits_of(second))
