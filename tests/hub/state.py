"""What the small Hub of :mod:`tests.hub.server` keeps: repositories, branches and commits; and how it refuses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".png")


@dataclass
class Commit:
    """A state of a repository: its id and every file's bytes."""

    oid: str
    files: dict[str, bytes]


@dataclass
class Repo:
    """A repository: private, gated or neither, and its branches, newest commit last."""

    private: bool = False
    gated: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit(sha1(b"start"), {})]})

    def find(self, revision: str) -> Commit | None:
        """The newest commit of a branch, or the commit with that id."""
        if revision in self.branches:
            return self.branches[revision][-1]
        everything = [commit for branch in self.branches.values() for commit in branch]
        return next((commit for commit in everything if commit.oid == revision), None)


class Refused(Exception):
    """An answer that is an error: status, the Hub's error code, message."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def git_oid(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data)


def entry(path: str, data: bytes) -> dict[str, Any]:
    """A file as the tree and paths-info endpoints describe it."""
    row: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
    if path.endswith(LFS_SUFFIXES):
        row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return row


def card_data(files: dict[str, bytes]) -> dict[str, Any]:
    """The metadata on top of a repository's README.md."""
    parts = files.get("README.md", b"").decode().split("---\n")
    return yaml.safe_load(parts[1]) if len(parts) > 2 else {}
