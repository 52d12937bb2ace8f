"""A draft model of a target's first layers: it learns, it is an ordinary folder, and it drafts for its target."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import infer
from heads.target import Target
from tests.tiny import tiny_model
from tests.train.world import ROOT, finished
from train import distill, student
from train.distill import Settings
from train.student import first_layers, judge


def settings(world: Path, **changes: Any) -> Settings:
    names = {"data": str(world / "train.jsonl"), "heldout": str(world / "heldout.jsonl")}
    fixed = {"target": str(world / "target"), "layers": 2, "steps": 20, "lr": 1e-2, "batch_tokens": 256}
    return Settings(str(world / "draft"), **{**names, **fixed, "dtype": "float32", **changes})


def test_it_learns_and_drafts(world: Path) -> None:
    # judged on what it was taught: a random target's ways hardly carry over to other text
    report = distill.distill(settings(world, heldout=str(world / "train.jsonl")))
    out = world / "draft"
    assert report["steps"] == 20 and json.loads((out / "distill.json").read_text()) == report
    before, after = report["heldout"]["before"], report["heldout"]["after"]
    assert after["loss"] < 0.85 * before["loss"] and after["tokens"] == before["tokens"] > 50
    assert report["seconds_per_token"]["ratio"] > 0

    draft, target = AutoModelForCausalLM.from_pretrained(out), Target.load(str(world / "target"), dtype=torch.float32)
    assert draft.config.num_hidden_layers == 2 and draft.config.vocab_size == target.vocab_size
    assert (out / "model.safetensors").is_file()
    assert torch.equal(draft.get_output_embeddings().weight, target.output.weight)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == target.tokenizer().get_vocab()

    prompt = torch.tensor([[5, 80, 40, 22, 90]])
    plain = target.model.generate(prompt, max_new_tokens=12, do_sample=False)
    out_of_it = infer.generate(target, prompt, draft=f"model:{out}", max_new_tokens=12)
    assert torch.equal(out_of_it.sequences, plain) and out_of_it.stats.proposed > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_the_first_layers_are_the_targets(family: str) -> None:
    target = Target(tiny_model(family, dtype=torch.float32))
    draft = first_layers(target, 3)
    ids = torch.tensor([[5, 60, 2, 41]])
    torch.testing.assert_close(draft(ids).logits, target.project(target.partial(range(3))(ids)))
    frozen = {id(p) for p in draft.parameters() if not p.requires_grad}
    assert frozen == {id(draft.get_input_embeddings().weight), id(draft.get_output_embeddings().weight)}


def test_tied_matrices_stay_tied() -> None:
    draft = first_layers(Target(tiny_model("llama", dtype=torch.float32, tie_word_embeddings=True)), 1)
    assert draft.get_input_embeddings().weight is draft.get_output_embeddings().weight


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    """Chunks of rows add up to what one graph over all of them gives."""
    target = Target(tiny_model("llama", dtype=torch.float64))
    target.model.requires_grad_(False)
    draft = first_layers(target, 2).double()
    ids, mask = torch.randint(64, (3, 120)), torch.rand(3, 120) > 0.3
    out = judge(draft, target, ids, mask, learn=True)
    name, parameter = next((n, p) for n, p in draft.named_parameters() if p.requires_grad)
    ours = parameter.grad.clone()
    draft.zero_grad()
    rows = mask[:, 1:]
    log_q = draft(ids).logits[:, :-1][rows].log_softmax(-1)
    p = target.forward(ids).logits[:, :-1][rows].softmax(-1)
    loss = -(p * log_q).sum(-1).mean()
    loss.backward()
    mean = float(loss.detach())
    assert out.count == int(rows.sum()) > student.LOGIT_ROWS and out.loss / out.count == pytest.approx(mean)
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert out.agreed == int((log_q.argmax(-1) == p.argmax(-1)).sum())


def test_the_script_runs_from_anywhere(world: Path) -> None:
    names = {"--data": world / "train.jsonl", "--heldout": world / "heldout.jsonl", "--target": world / "target"}
    words = [str(word) for pair in names.items() for word in pair]
    command = [sys.executable, str(ROOT / "train" / "distill.py"), *words, "--layers", "1", "--steps", "1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = finished([*command, "--dtype", "float32", "--out", str(world / "d")], 240, environ)
    assert done.returncode == 0, done.stderr
    assert "agreement" in done.stdout and (world / "d" / "config.json").is_file()


@pytest.mark.parametrize("layers", [0, 4, 7])
def test_the_layers_must_be_fewer_than_the_targets(layers: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 3 layers, not {layers}"):
        first_layers(Target(tiny_model("llama")), layers)


def test_errors_end_with_status_2(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--target", str(world / "target"), "--layers", "2", "--out"]
    assert distill.main([*common, str(world)]) == 2
    assert "holds something already" in capsys.readouterr().err
    assert distill.main([*common, str(world / "new"), "--data", str(world / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err and not (world / "new").exists()
