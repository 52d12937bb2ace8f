"""Settings: strict, typed by the schema, the same in YAML and on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.world import ROOT
from train.assemble import find_recipe
from train.config import RunConfig
from train.settings import KEYS, SECTIONS, SettingsError, fields_of, load, parse, to_dict, to_yaml


def read(folder: Path, text: str, *arguments: str) -> RunConfig:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return load(path, arguments)


@pytest.mark.parametrize("text", ["lr: 5e-5", 'lr: "5e-5"', "lr: 0.00005"])
def test_a_number_is_a_number_however_it_is_written(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f"train: {{{text}}}").train.lr == 0.00005


def test_no_number_is_told_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"recipe\.yaml: train\.lr cannot be 'abc'"):
        read(tmp_path, "train: {lr: abc}")


def test_a_leading_zero_is_not_octal(tmp_path: Path) -> None:
    assert read(tmp_path, "train: {seed: 010}").train.seed == 10


BOOLEANS = [
    (section, name)
    for section, kind in SECTIONS.items()
    for name, (wanted, _) in fields_of(kind).items()
    if wanted is bool
]


@pytest.mark.parametrize(("section", "name"), BOOLEANS)
@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("no", False), ("on", True)])
def test_every_boolean_both_ways(tmp_path: Path, section: str, name: str, text: str, value: bool) -> None:
    from_file = read(tmp_path, f"{section}: {{{name}: {text}}}")
    from_line = read(tmp_path, "{}", f"--{section}.{name}={text}")
    assert to_dict(from_file)[section][name] is value
    assert from_line == from_file


def test_every_mode_is_accepted_and_no_other(tmp_path: Path) -> None:
    modes = [
        (section, name, item.metadata["choices"])
        for section, kind in SECTIONS.items()
        for name, (_, item) in fields_of(kind).items()
        if item.metadata["choices"]
    ]
    assert len(modes) >= 6
    for section, name, choices in modes:
        for choice in choices:
            assert to_dict(read(tmp_path, f"{section}: {{{name}: {choice}}}"))[section][name] == choice
        with pytest.raises(SettingsError, match=rf"{section}\.{name} is 'nonsense', but may be {choices[0]}"):
            read(tmp_path, f"{section}: {{{name}: nonsense}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lerning_rate: 1}", r"recipe\.yaml: unknown setting train\.lerning_rate: did you mean train\.lr\?"),
        ("train: {learning_rate: 1}", r"did you mean train\.lr\?"),
        ("train: {warmup: 1}", r"did you mean train\.warmup_steps\?"),
        ("trian: {lr: 1}", r"recipe\.yaml: unknown section 'trian': did you mean .*train"),
        ("train: {lr: 1, lr: 2}", r"line 1: 'lr' is given more than once"),
        ("train: [1]", r"train must be a mapping"),
        ("- 1", r"a recipe is a mapping of sections"),
        ("train: {max_steps: [1]}", r"train\.max_steps cannot be \['1'\]: one value is wanted"),
        ("output: {resume: maybe}", r"output\.resume cannot be 'maybe': true or false"),
        ("train: {loss: 3}", r"train\.loss cannot be '3': a mapping is wanted"),
        ("train: {", r"not valid YAML"),
        ("output: {folder: ''}", r"output\.folder is empty: give it a value, or leave it out"),
        ("data: {train: }", r"data\.train is empty"),
        ("train: {max_steps: 0}", r"recipe\.yaml: train\.max_steps is 0, it must be 1 or more"),
        ("train: {epochs: -1}", r"train\.epochs is -1, it must be 1 or more"),
        ("train: {lr: nan}", r"train\.lr is nan, it must be finite"),
        ("train: {clip: inf}", r"train\.clip is inf, it must be finite"),
        ("train: {beta2: 1}", r"train\.beta2 is 1\.0, it must be 0 or more and below 1"),
        ("train: {seed: -1}", r"train\.seed is -1, it must be 0 or more and at most 4294967295"),
        ("heads: {draft_vocab_coverage: 1.5}", r"coverage is 1\.5, it must be above 0 and at most 1"),
        ("heads: {draft_vocab_coverage: 0}", r"coverage is 0\.0, it must be above 0 and at most 1"),
        ("eval: {lookahead: 0}", r"eval\.lookahead is 0, it must be 1 or more"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read(tmp_path, text)


def test_a_recipe_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"train: {lr: 1}  # \xe9")
    with pytest.raises(SettingsError, match=r"recipe\.yaml is not UTF-8 text"):
        load(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--foo", "1"], "unknown setting '--foo': did you mean"),
        (["--lr", "1"], r"did you mean train\.lr\?"),
        (["--train.lrr=1"], r"did you mean train\.lr\?"),
        (["stray"], "unknown setting 'stray'"),
        (["--train.lr"], r"--train\.lr needs a value"),
        (["--output.resume", "--train.lr", "1"], r"--output\.resume needs a value, as in `--output\.resume false`"),
        (["--train.lr.x", "1"], r"train\.lr has no entries"),
    ],
)
def test_the_command_line_is_as_strict(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read(tmp_path, "{}", *arguments)


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "train: {lr: 1, seed: 3}\nheads: {taps: [1, 2], options: {own_output: no, layers: 2}}",
        "--train.lr", "2e-3", "--heads.taps", "4,5,6", "--train.loss.lk", "0.5", "--heads.options.layers=3",
    )  # fmt: skip
    assert (config.train.lr, config.train.seed) == (2e-3, 3)
    assert config.heads.taps == (4, 5, 6)
    assert config.train.loss == {"soft_ce": 1.0, "lk": 0.5}
    assert config.heads.options == {"own_output": False, "layers": 3}


def test_unset_values_can_be_said(tmp_path: Path) -> None:
    config = read(tmp_path, "train: {max_steps: null}\nheads: {lookahead: 3}", "--heads.lookahead", "none")
    assert config.train.max_steps is None
    assert config.heads.lookahead is None


def test_effective_settings_read_back_as_they_are(tmp_path: Path) -> None:
    config = read(tmp_path, "train: {lr: 5e-5}\nheads: {taps: [2, 3], options: {a: 1e-3, b: yes, c: text}}")
    assert read(tmp_path, to_yaml(config)) == config
    assert to_dict(replace(config)).keys() == SECTIONS.keys()


def test_recipe_is_chosen_by_config_and_is_the_quickstart_without() -> None:
    assert parse(["--train.lr", "1"]) == ("quickstart.yaml", ["--train.lr", "1"])
    assert parse(["--train.lr", "1", "--config=x.yaml"]) == ("x.yaml", ["--train.lr", "1"])
    for wrong in (["--config"], ["--config", "a", "--config", "b"]):
        with pytest.raises(SettingsError, match="--config needs one recipe"):
            parse(wrong)


def test_recipes_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("configs/quickstart.yaml", "quickstart.yaml", "quickstart"):
        assert find_recipe(name) == ROOT / "configs" / "quickstart.yaml"
    with pytest.raises(FileNotFoundError, match=r"no recipe configs/nope\.yaml; there are .*configs/quickstart\.yaml"):
        find_recipe("configs/nope.yaml")


def test_a_mapping_is_replaced_as_a_whole_or_by_the_entry(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train: {loss: {soft_ce: 1.0}}")
    assert load(recipe, ["--train.loss.tv", "0.5"]).train.loss == {"soft_ce": 1.0, "tv": 0.5}
    assert load(recipe, ["--train.loss", "{lk: 1, tv: 0.5}"]).train.loss == {"lk": 1.0, "tv": 0.5}
    for wrong in ("{lk: 1", "lk", "{lk: 1, lk: 2}"):
        with pytest.raises(SettingsError, match=r"train\.loss|more than once"):
            load(recipe, ["--train.loss", wrong])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_each_recipe_loads_and_opens_with_its_command(path: Path) -> None:
    config = load(path)
    opening = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any("accelerate launch train/train_heads.py" in line for line in opening)
    assert config.train.max_steps, "a recipe's time is fixed by its step count"


NUMBERS: list[Any] = [int, float, int | None, float | None]
COUNTS = {
    "data": "max_length workers ahead",
    "heads": "lookahead draft_vocab_size draft_vocab_coverage",
    "train": "seed epochs max_steps batch_tokens micro_tokens bucket lr warmup_steps final_lr beta1 beta2 "
    "momentum muon_factor row_beta weight_decay clip log_every save_every",
    "eval": "every conversations prompts tokens lookahead",
    "output": "keep",
}


def test_no_number_may_be_below_its_bounds(tmp_path: Path) -> None:
    """Each would be a division by zero, no step at all, or a sign turned round."""
    for section, kind in SECTIONS.items():
        numbers = [name for name, (wanted, _) in fields_of(kind).items() if wanted in NUMBERS]
        assert numbers == COUNTS.get(section, "").split()
        for name in numbers:
            with pytest.raises(
                SettingsError, match=rf"{section}\.{name} is -1(\.0)?, it must be (0|1) or more|above 0"
            ):
                read(tmp_path, "{}", f"--{section}.{name}", "-1")


def test_every_setting_has_help() -> None:
    for kind in SECTIONS.values():
        for name, (_, item) in fields_of(kind).items():
            assert item.metadata["help"], name
    assert len(KEYS) == len(set(KEYS))
