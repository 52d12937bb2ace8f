"""The README stays true: its tree names every file, and its commands and verbs exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("heads", "data", "infer", "train", "configs", "tests")


def test_the_tree_names_every_file_with_a_comment() -> None:
    tree = README.split("## Files")[1].split("```")[1]
    named: dict[str, str] = {}
    folder = ""
    for line in tree.splitlines():
        entry = re.match(r"(\s*)(\S+)\s*(.*)", line)
        if entry is None:
            continue
        indent, name, comment = entry.groups()
        if not indent and name.endswith("/"):
            folder = name
        else:
            named[(folder if indent else "") + name] = comment
    there = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".yaml", ".json", ".gz") and path.name != "__init__.py"
        if "__pycache__" not in path.parts
    }
    assert there - named.keys() == set(), "README.md's tree lacks files"
    stale = {name for name in named if name.startswith(PACKAGES) and not (ROOT / name).exists()}
    assert stale == set(), "README.md's tree names files that are gone"
    assert [name for name, comment in named.items() if not comment] == []


def test_the_make_targets_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M)) <= targets


def test_the_verbs_it_names_exist() -> None:
    from headstart import verbs

    usage = verbs().parser.format_help()
    named = set(re.findall(r"^headstart ([a-z-]+)", README, re.M))
    assert named
    assert [verb for verb in named if not re.search(rf"\b{verb}\b", usage)] == []
