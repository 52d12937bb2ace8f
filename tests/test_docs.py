"""docs/ and README stay true: commands are taken by the command line, code compiles, configurations are JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart import parse, verbs
from tests.written import blocks, commands
from train.assemble import find_recipe
from train.settings import load

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "results" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_taken_and_code_compiles(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parser = verbs().parser
    ours = [words[1:] for words in commands(text) if words[0] == "headstart"]
    assert ours
    for words in ours:
        args = parse(parser, words)
        assert callable(args.run), words
        if getattr(args, "takes_settings", False):
            load(find_recipe(args.config), args.settings)
    for code in blocks(text, "python"):
        compile(code.replace("…", "x"), page.name, "exec")


def test_engines_are_given_json() -> None:
    given = [words for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    settings = [json.loads(words[words.index("--speculative-config") + 1]) for words in given if words[0] == "vllm"]
    assert settings and all(found.keys() == {"method", "model", "num_speculative_tokens"} for found in settings)


def test_a_wrong_command_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The parser that is asked here refuses what nobody could run."""
    (words,) = commands("```bash\nheadstart export HEADS \\\n    --to eagle9 --out 'a b'   # no such format\n```")
    assert words == ["headstart", "export", "HEADS", "--to", "eagle9", "--out", "a b"]
    with pytest.raises(SystemExit):
        verbs().parser.parse_args(words[1:])
    assert "invalid choice: 'eagle9'" in capsys.readouterr().err
