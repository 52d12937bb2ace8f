"""The layers, read off the imports: nothing imports what stands above it; and the house rules of each file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "heads": set(),
    "data": set(),
    "infer": {"heads"},
    "train": {"heads", "data", "infer"},
    "headstart": {"heads", "data", "infer", "train"},
}
PACKAGES = ["heads", "data", "infer", "train"]
MAX_LINES = 300


def sources(*tops: str) -> list[Path]:
    found = [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]
    return [*found, ROOT / "headstart.py"]


OURS = sources(*PACKAGES)
ALL = [*OURS, *sorted((ROOT / "tests").rglob("*.py"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(text: str) -> Iterator[str]:
    """Top-level names that a source imports, wherever in it, and those it imports by a string."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            yield from (str(arg.value).partition(".")[0] for arg in node.args[:1] if isinstance(arg, ast.Constant))


def above(package: str, text: str) -> set[str]:
    """What a source of ``package`` imports though it may not."""
    return (set(imported(text)) & (MAY_IMPORT.keys() | {"tests"})) - MAY_IMPORT[package] - {package}


def test_imports_nothing_above() -> None:
    wrong = {}
    for path in OURS:
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        # the code that is pushed beside heads runs on its own, where the whole library is installed
        allowed = {"infer"} if name(path) == "heads/custom_generate/generate.py" else set()
        if names := above(package, path.read_text(encoding="utf-8")) - allowed:
            wrong[name(path)] = names
    assert wrong == {}


@pytest.mark.parametrize(
    "package, text",
    [
        ("heads", "import infer"),
        ("heads", "def f():\n    from data.prepare import load"),
        ("data", "from heads import Target"),
        ("infer", "if TYPE_CHECKING:\n    import train.loop as loop"),
        ("infer", "importlib.import_module('data.render')"),
        ("train", "import headstart"),
        ("train", "from tests.tiny import tiny_model"),
    ],
)
def test_a_wrong_import_is_seen(package: str, text: str) -> None:
    assert above(package, text)


def test_top_level_is_fixed() -> None:
    """Folders with Python in them, and modules, that stand in the repository itself."""
    files = [path for path in ROOT.glob("*/**/*.py") if not path.relative_to(ROOT).parts[0].startswith(".")]
    made = {"build", "runs"}
    assert {path.relative_to(ROOT).parts[0] for path in files} - made == {*PACKAGES, "tests"}
    assert {path.name for path in ROOT.glob("*.py")} == {"headstart.py"}


def test_each_file_says_what_it_is_for() -> None:
    texts = {name(path): path.read_text(encoding="utf-8") for path in ALL}
    assert [path for path, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))] == []


def test_no_file_is_long() -> None:
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


# Spelt in halves, so that this file does not break its own rule.
UNWANTED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "/wo" + "rk/", "/tmp" + "/", "index" + "-url"]))


def test_nothing_unfinished_and_no_places_of_a_machine() -> None:
    others = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / ".ci" / "run"]
    lines = [(name(path), line) for path in [*ALL, *others] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(path, line) for path, line in lines if UNWANTED.search(line)] == []
