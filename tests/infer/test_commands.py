"""The verbs, on a tiny target and heads in folders of their own: reports, texts, files, and refusals."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import heads
from heads.grow import Budget
from heads.target import Target
from infer import commands, options
from tests.data import toys
from tests.tiny import tiny_model

Run = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads (of the kind eagle, untrained) beside the folder of their target."""
    root = tmp_path_factory.mktemp("run")
    tokenizer = toys.tokenizer()
    model = tiny_model("llama", dtype=torch.float32, vocab=len(tokenizer), layers=8, max_position_embeddings=4096)
    model.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    target = Target.load(str(root / "target"), dtype=torch.float32)
    made = heads.build(heads.make_config("eagle", target, lookahead=3, taps=(1, 3, 5)), target)
    made.initialize()
    made.save_pretrained(root / "heads")
    return root / "heads"


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sample of eight prompts in place of the one that comes along."""
    sample = tmp_path / "heldout.jsonl.gz"
    rows = [{"messages": toys.chat(f"tell me {n}", "no")} for n in range(8)]
    with gzip.open(sample, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr(options, "SAMPLE", sample)
    return sample


def verbs(closest: Any = None) -> dict[str, Run]:
    """The package's verbs, each called with its command line."""
    found: dict[str, Run] = {}

    def add(
        name: str,
        *,
        help: str,
        example: str,
        configure: Callable[[argparse.ArgumentParser], None],
        run: Callable[[argparse.Namespace], tuple[dict[str, Any], str]],
    ) -> None:
        assert help and f"headstart {name} " in example
        parser = argparse.ArgumentParser()
        configure(parser)
        found[name] = lambda *argv: run(parser.parse_args([str(word) for word in argv]))

    commands.register(add, closest)
    return found


def test_the_verbs() -> None:
    assert list(verbs()) == ["eval", "bench", "plan", "stability", "verify", "generate"]


def test_eval(folder: Path, prompts: Path) -> None:
    report, text = verbs()["eval"](
        folder, "--count", 2, "--max-new-tokens", 12, "--rows", 4, "--calibrate", 1, "--dtype", "float32"
    )
    assert set(report["budgets"]) == {"chain 3", "dynamic tree 4", "static tree 4"} or set(report["budgets"]) == {
        "chain 3",
        "dynamic tree 4",
    }  # untrained heads may leave nothing to build a static tree from
    assert report["settings"]["prompts"] == 2 and report["heads"] == str(folder)
    assert "chain 3" in text
    json.dumps(report)


def test_eval_of_chains_only_measures_nothing_beforehand(folder: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(
        '{"turns": ["a"], "category": "x"}\n{"turns": ["b"], "category": "y"}\n{"turns": ["c"], "category": "x"}'
    )
    report, _ = verbs()["eval"](
        folder, "--prompts", file, "--per-category", 1, "--max-new-tokens", 6, "--rows", "--dtype", "float32"
    )
    assert list(report["budgets"]) == ["chain 3"]
    assert list(report["budgets"]["chain 3"]["by_category"]) == ["x", "y"]
    assert report["rank_acceptance"] == []


def test_eval_names_the_pair_most_alike(folder: Path, prompts: Path, tmp_path: Path) -> None:
    training = tmp_path / "train.jsonl"
    training.write_text('{"prompt": "p"}\n{"prompt": "q"}')

    def closest(train: Sequence[str], heldout: Sequence[str]) -> SimpleNamespace:
        assert (train, heldout) == (["p", "q"], ["tell me 0"])
        return SimpleNamespace(train=1, heldout=0, similarity=0.25, run=2)

    report, text = verbs(closest)["eval"](
        folder, "--count", 1, "--max-new-tokens", 4, "--rows", "--training", training, "--dtype", "float32"
    )
    assert report["closest"] == {"similarity": 0.25, "run": 2, "training": "q", "evaluation": "tell me 0"}
    assert "0.25 alike" in text


def test_bench(folder: Path, prompts: Path) -> None:
    argv = [folder, "--count", 2, "--warmup", 1, "--max-new-tokens", 8, "--dtype", "float32"]
    report, text = verbs()["bench"](*argv, "--draft", "chain:2")
    assert report["ok"] and report["equality"]["identical"]
    assert report["budget"] == {"rows": 3, "depth": 2, "width": 1, "shape": None}
    assert "speed-up" in text
    assert report["settings"]["warmup_prompts"] == ["sample 8"]


def test_bench_of_several_drafts(folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    argv = [folder, "--count", 2, "--warmup", 1, "--max-new-tokens", 8, "--dtype", "float32"]
    report, text = verbs()["bench"](*argv, "--drafts", "heads,lookup,layers:0-1,4", "--temperature", "0,0.8")
    assert list(report["temperatures"]) == ["0", "0.8"]
    assert {"heads", "lookup", "layers:0-1,4"} <= set(report["temperatures"]["0"]["ways"])
    assert all(figures["all"]["identical"] == 2 for figures in report["temperatures"]["0"]["ways"].values())
    assert "layers:0-1,4" in text


def test_bench_without_heads_and_of_batches(folder: Path, prompts: Path) -> None:
    argv = ["--target", folder.parent / "target", "--drafts", "lookup", "--dtype", "float32", "--max-new-tokens", 6]
    report, text = verbs()["bench"](*argv, "--count", 2, "--batches", "1,2", "--depths", "0,2", "--repeats", 1)
    assert list(report["rates"]) == ["1", "2"] and "tokens a second" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs HEADS"),
        (["--drafts", "lookup"], "--target"),
        (["HEADS", "--target", "/no/such/target"], "there is no folder /no/such/target"),
        (["HEADS", "--batches", "1", "--drafts", "heads,lookup"], "measures one draft"),
    ],
)
def test_bench_that_names_too_little_or_too_much(folder: Path, prompts: Path, argv: list[str], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        verbs()["bench"](*(folder if word == "HEADS" else word for word in argv), "--count", 2, "--dtype", "float32")


def test_plan_before_and_after_training(folder: Path, prompts: Path, tmp_path: Path) -> None:
    argv = [folder.parent / "target", "--dtype", "float32", "--batches", "1,2", "--repeats", 1, "--count", 1]
    argv += ["--context", 8, "--lookahead", 2, "--max-new-tokens", 6]
    report, text = verbs()["plan"](*argv, "--acceptance", "0.5", "--png", tmp_path / "plan.png")
    assert list(report["best"]) == ["0.5"] and list(report["curve"]) == ["1", "2"]
    assert report["heads"] == "untrained, kind eagle" and report["advice"] in text
    assert (tmp_path / "plan.png").is_file()
    report, text = verbs()["plan"](argv[0], folder, *argv[1:], "--layers")
    assert next(iter(report["best"])) == "measured"
    assert all(found["draft"].startswith("layers:") for found in report["layers"])
    assert report["layers"][0]["draft"] in text
    json.dumps(report)
    with pytest.raises(FileNotFoundError, match="make it first"):
        verbs()["plan"](*argv, "--png", tmp_path / "none" / "plan.png")


def test_plan_for_heads_that_draft_inside_the_pass(folder: Path, prompts: Path, tmp_path: Path) -> None:
    target = Target.load(str(folder.parent / "target"), dtype=torch.float32)
    made = heads.build(heads.make_config("mtp", target, lookahead=2), target)
    made.initialize()
    made.save_pretrained(tmp_path / "mtp")
    argv = [folder.parent / "target", tmp_path / "mtp", "--dtype", "float32", "--batches", "1", "--repeats", 1]
    report, text = verbs()["plan"](*argv, "--context", 8, "--count", 1, "--max-new-tokens", 6)
    assert len(report["by_depth"]["measured"]["1"]) == 3 and report["advice"] in text
    assert {"4", "9"} <= set(report["curve"]["1"]), "a token and its masks, two tokens and theirs"


def test_built_in_prompts(prompts: Path) -> None:
    made = options.read_prompts("builtin:json")
    assert len({prompt.messages[0]["content"] for prompt in made}) == 20
    assert {prompt.category for prompt in made} == {"json extraction"}
    assert made == options.read_prompts("builtin:json")
    parser = argparse.ArgumentParser()
    options.prompt_options(parser, 3)
    args = parser.parse_args(["--prompts", "builtin:json", "--prompts", str(prompts), "--per-category", "2"])
    assert [prompt.category for prompt in options.prompts_of(args)] == ["json extraction"] * 2 + ["all"] * 2
    assert options.named_prompts(args) == f"builtin:json, {prompts}"


@pytest.mark.parametrize(
    ("option", "value"), [("--temperature", "-1"), ("--temperature", "x"), ("--batches", "0"), ("--depths", "-1")]
)
def test_lists_of_numbers_are_checked(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verbs()["bench"]("h", f"{option}={value}")
    assert option in capsys.readouterr().err


def test_verify_writes_a_certificate(folder: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    argv = [folder, "--prompts-count", 2, "--max-new-tokens", 8, "--draws", 40, "--top-k", 2, "--certificate", path]
    report, text = verbs()["verify"](*argv)
    assert json.loads(path.read_text()) == report
    assert report["greedy"]["float32"]["identical"] and report["greedy"]["bfloat16"]["passed"]
    assert all(block["passed"] for block in report["sampled"]["drafts"].values())
    assert report["ok"] == report["passed"]
    assert len(report["heads"]["sha256"]) == 64 and report["versions"]["torch"] == torch.__version__
    assert str(path) in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c.json", "heldout.jsonl.gz"]


def test_generate_streams_what_it_returns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, text = verbs()["generate"](folder, "hello", "--max-new-tokens", 16, "--dtype", "float32")
    assert capsys.readouterr().out == report["text"] + "\n"
    assert report["tokens"] == len(report["ids"]) == 16
    assert "tokens per round" in text


def test_marks_do_not_change_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [folder, "hello", "--max-new-tokens", 24, "--dtype", "float32"]
    plain, _ = verbs()["generate"](*argv)
    capsys.readouterr()
    marked, _ = verbs()["generate"](*argv, "--mark", "--draft", "tree:12")
    assert re.sub("[⟦⟧]", "", capsys.readouterr().out) == marked["text"] + "\n"
    assert plain["text"] == marked["text"]


def test_sampled_text_repeats_with_its_seed(folder: Path) -> None:
    argv = [folder, "hello", "--raw", "--temperature", 1.0, "--max-new-tokens", 12, "--dtype", "float32", "--seed"]
    first, again, other = (verbs()["generate"](*argv, seed)[0] for seed in (1, 1, 2))
    assert first["text"] == again["text"] != other["text"]


def test_heads_that_are_none_are_an_error(tmp_path: Path, prompts: Path) -> None:
    for verb, *rest in (("eval", "--count", 1), ("bench", "--count", 1), ("verify",)):
        with pytest.raises((ValueError, OSError), match=re.escape(str(tmp_path))):
            verbs()[str(verb)](tmp_path, *rest)


@pytest.mark.parametrize("text", ["chain", "chain:", "chain:0", "tree:x", "net:3", ""])
def test_a_draft_written_wrongly(text: str) -> None:
    with pytest.raises(ValueError, match=r"write auto, chain:N, tree:N"):
        options.budget_of(text, "auto", 5)


def test_drafts_as_written() -> None:
    assert options.budget_of("auto", "auto", 5) is None
    assert options.budget_of("chain:4", "auto", 5) == Budget.chain(4)
    assert options.budget_of("tree:16", "auto", 5) == Budget(rows=16, depth=5, width=8)


def test_prompts_to_measure_on_beforehand_are_others(prompts: Path) -> None:
    every = options.read_prompts(prompts)
    rest = options.others(every[5:], 3)
    assert [prompt.messages for prompt in rest] == [prompt.messages for prompt in every[2:5]]
    with pytest.raises(ValueError, match="only 0 are left"):
        options.others(every, 1)


def test_a_missing_sample_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "SAMPLE", tmp_path / "none.gz")
    with pytest.raises(FileNotFoundError, match="--prompts"):
        options.sample()
