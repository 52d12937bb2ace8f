"""What people give the command line by mistake: one clear line and status 2, before anything is asked or made."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from heads.target import Target
from headstart import main
from tests.hub.reports import bench, certificate, evaluation, training
from tests.hub.server import TOKEN, Hub
from tests.hub.world import heads_on, save_target

PUSH = ["push", "heads", "org/new", "--target-name", "org/target"]


@pytest.fixture
def world(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """``target`` and ``heads`` in this folder, and an empty Hub that would take them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    heads_on(Target.load(str(save_target(tmp_path / "target")), dtype=torch.float32)).save_pretrained("heads")
    hub.repos.clear()
    return hub


def refused(arguments: list[str], capfd: pytest.CaptureFixture[str], message: str) -> None:
    """The verb ends with 2, and its last line is the message."""
    try:
        status = main(arguments)
    except SystemExit as end:  # argparse's own
        status = int(end.code or 0)
    err = capfd.readouterr().err
    assert status == 2 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and message in err.splitlines()[-1], err


def without(report: dict[str, Any], *path: str) -> dict[str, Any]:
    """A report that lacks an entry somewhere inside."""
    place = report
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return report


REPORTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an older evaluation": (lambda: without(evaluation(), "dtype"), "evaluation is not as `headstart eval --json` wr"),
    "no budgets": (lambda: evaluation() | {"budgets": {}}, "the report's evaluation is not as `headstart eval"),
    "no evaluation": (lambda: {"evaluation": "good"}, "the evaluation report must be a JSON object, not a str"),
    "half a bench": (lambda: without(bench(), "settings", "order"), "bench is not as `headstart bench --json` writes"),
    "half a certificate": (lambda: without(certificate(), "versions"), "certificate is not as `headstart verify` wri"),
    "heads by name": (lambda: certificate() | {"heads": "x"}, "the report's certificate is not as `headstart verify`"),
    "an odd run": (lambda: training() | {"settings": ["lr"]}, "the report's training is not as a training run writes"),
    "odd positions": (lambda: {"accepted_per_position": "abc"}, "accepted_per_position is not of a form that a card"),
}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("name", REPORTS)
def test_reports_that_no_card_can_show(
    name: str, dry: list[str], world: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    make, message = REPORTS[name]
    report = make()
    for value in (report, report.get("heads")):  # of no particular weights
        if isinstance(value, dict):
            value.pop("heads_sha256", None)
            value.pop("sha256", None)
    Path("report.json").write_text(json.dumps(report))
    refused([*PUSH, "--report", "report.json", *dry], capfd, message)
    assert world.requests == [] and world.repos == {}, "not even an empty repository"


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b""])
def test_a_report_that_is_no_json(text: bytes, world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    Path("report.json").write_bytes(text)
    refused([*PUSH, "--report", "report.json"], capfd, "report.json is not JSON")
    assert world.repos == {}


def test_a_secret_is_found_before_a_repository_is_made(world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    Path("report.json").write_text(json.dumps({"recipe": f"with {TOKEN}"}))
    for dry in ([], ["--dry-run"]):
        refused([*PUSH, "--report", "report.json", *dry], capfd, "README.md holds what looks like an access token")
    assert world.requests == [] and world.repos == {}


@pytest.mark.parametrize("repo_id", ["../new", "./new", "org/a--b", "org/new.git", "org/nëw", "org/", "-org/new", ""])
def test_names_that_are_none_on_the_hub(repo_id: str, world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    for dry in ([], ["--dry-run"]):
        words = ["push", "heads", "--target-name", "org/target", *dry, "--", repo_id]
        refused(words, capfd, "is no Hub id: it must be ORG/NAME")
    assert world.requests == []


def test_a_target_known_by_a_path_that_is_gone(world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """It is no id of the Hub either, though it looks like one."""
    for path in ("../target", "models/target.git"):
        refused([*PUSH[:3], "--target-name", path], capfd, f"these heads name their target as {path!r}, a folder that")
    assert world.requests == []


def test_a_file_is_no_folder_of_heads(world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    file = "heads/heads.safetensors"
    message = f"{file} is a file: name the folder that holds config.json and heads.safetensors"
    refused(["push", file, "org/new"], capfd, message)
    refused(["bundle", file, "--out", "out"], capfd, message)
    refused(["export", file, "--to", "eagle3", "--out", "out"], capfd, message)
    refused(["generate", file, "hello"], capfd, message)
    assert world.requests == [] and not Path("out").exists()


def test_a_folder_has_no_revision(world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["import", "heads", "--target", "target", "--out", "out", "--revision", "v2"]
    refused(words, capfd, "heads lies here and has no revision 'v2'")


def test_a_licence_cannot_break_the_cards_metadata(world: Hub) -> None:
    licence = "mine: all\nlicense: mit"
    assert main([*PUSH, "--license", licence]) == 0
    text = world.files("org/new")["README.md"].decode()
    assert yaml.safe_load(text.split("---\n")[1])["license"] == licence


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--certificate", "no/such/c.json"], "the folder no/such does not exist, make it first"),
        (["--certificate", "target"], "the certificate cannot be written to target: name another file"),
        (["--temperature", "0"], "argument --temperature: 0 is not above 0"),
        (["--temperature", "nan"], "argument --temperature: nan is not above 0"),
        (["--top-p", "0"], "argument --top-p: 0 is not above 0 and at most 1"),
        (["--top-p", "1.5"], "argument --top-p: 1.5 is not above 0 and at most 1"),
        (["--prompts", "cut.jsonl.gz"], "cut.jsonl.gz is cut short, or no text in UTF-8"),
        (["--prompts", "latin.jsonl"], "latin.jsonl is cut short, or no text in UTF-8"),
        (["--prompts", "deep.jsonl"], "deep.jsonl, line 1 is no JSON"),
        (["--prompts", "parts.jsonl"], "parts.jsonl, line 1: the content of a turn is no text but a list"),
    ],
)
def test_what_verify_is_given(
    words: list[str], message: str, world: Hub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is said before any text is decoded."""
    whole = gzip.compress(b'{"prompt": "hello"}\n' * 4000)
    Path("cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    Path("latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    Path("deep.jsonl").write_text("[" * 100_000)
    parts = [{"type": "text", "text": "hello"}]
    Path("parts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    monkeypatch.setattr("infer.certify.certify", lambda *_: pytest.fail("it began"))
    refused(["verify", "heads", *words], capfd, message)
    assert not list(Path().rglob("*certificate*"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut short": (lambda folder: cut(folder / "model.safetensors"), "is not a whole safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is not a whole safetensors file"),
    "config": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "config.json must hold a JSON object, not a list",
    ),
    "generation": (lambda folder: (folder / "generation_config.json").write_text("[]"), "must hold a JSON object"),
    "tokenizer": (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "must hold a JSON object"),
    "tokenizer cut": (lambda folder: cut(folder / "tokenizer.json"), "tokenizer.json is not valid JSON"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_target_that_is_not_whole(fault: str, world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither loaded, nor pushed as a bundle's part."""
    spoil, message = BROKEN[fault]
    assert main(["bundle", "heads", "--out", "whole"]) == 0
    spoil(Path("whole"))
    refused(["push", "whole", "org/new"], capfd, message)
    assert world.repos == {}
    refused(["bundle", "heads", "--target", "whole", "--out", "out"], capfd, message)
    refused(["generate", "whole", "hello"], capfd, message)
    assert not Path("out").exists()


def test_another_projects_checkpoint_is_imported_first(world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    message = "target/config.json is a model's or another project's, not that of heads: `headstart import` makes heads"
    for words in (["push", "target", "org/new"], ["bundle", "target", "--out", "out"]):
        refused(words, capfd, message)
    refused(["export", "target", "--to", "eagle3", "--out", "out"], capfd, message)


def test_weights_that_are_a_folder(world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    Path("heads/heads.safetensors").unlink()
    Path("heads/heads.safetensors").mkdir()
    refused(PUSH, capfd, "heads/heads.safetensors is missing, or no plain file")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_heads_that_are_not_finite_are_not_pushed(value: float, world: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    file = Path("heads/heads.safetensors")
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, {"format": "pt"})
    refused(PUSH, capfd, f"{name} holds NaN or infinity: train these heads again")
    assert not world.repos


def test_heads_that_are_not_finite_are_not_exported(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = heads_on(Target.load(str(save_target(tmp_path / "target", layers=8)), dtype=torch.float32), taps=(2, 4, 5))
    with torch.no_grad():
        made.get_parameter("fc.weight")[0, 0] = 1e6
    made.save_pretrained(tmp_path / "heads")
    words = ["export", str(tmp_path / "heads"), "--to", "eagle3", "--out"]
    refused(
        [*words, str(tmp_path / "half"), "--dtype", "float16"], capfd, "fc.weight would hold numbers that are not fin"
    )
    assert not (tmp_path / "half").exists() and main([*words, str(tmp_path / "whole")]) == 0
