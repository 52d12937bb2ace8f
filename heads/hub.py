"""Heads repositories on the Hugging Face Hub: push and fetch.

What goes up is named file by file (config, weights, card, the code for plain transformers); nothing else that lies in
a run's folder ever does. What comes down is the configuration and the safetensors, nothing that could run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, RepoFile, errors, hf_hub_download
from safetensors import SafetensorError, safe_open

from heads.card import card
from heads.store import CONFIG, WEIGHTS, HeadsFileError, read_config

if TYPE_CHECKING:
    from heads.base import DraftHeads

CARD, CODE = "README.md", "custom_generate/generate.py"
REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HubError(OSError):
    """The Hub refused, or could not be reached; one message that says what to do."""


@dataclass(frozen=True)
class Pushed:
    """What a push left behind: the repository, a URL of its new state, and the commits of state and weights."""

    repo_id: str
    url: str
    commit: str
    weights_commit: str
    files: tuple[str, ...] = (CONFIG, WEIGHTS, CARD, CODE)


def push(heads: DraftHeads, repo_id: str, **options: Any) -> str:
    """Upload heads; see :func:`push_folder`. Returns the URL of the repository at the commit that was made."""
    with tempfile.TemporaryDirectory(prefix="headstart-push-") as folder:
        heads.save_pretrained(folder)
        return push_folder(folder, repo_id, **options).url


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    report: Mapping[str, Any] | None = None,
    revision: str | None = None,
    target_name: str | None = None,
    token: str | None = None,
) -> Pushed:
    """Upload a folder that ``save_pretrained`` wrote. Pushing the same heads again makes no new commit.

    Args:
        folder: holds config.json and heads.safetensors; whatever else it holds stays where it is.
        repo_id: ``ORG/NAME``; made when it does not exist.
        private: of a repository that is made; one that exists must already be private when True.
        report: for the card, see :func:`heads.card.card`.
        revision: branch to push to, made when it does not exist; the main one when None.
        target_name: the target's Hub id, for heads trained on a local copy of it.
        token: as huggingface_hub takes it; None is the one that is logged in.

    Raises:
        ValueError: the target is known only by a local path, or the weights cannot be read.
        HubError: the Hub refused or could not be reached.
        HeadsFileError: the folder does not hold whole heads.
    """
    config = read_config(Path(folder))
    name = target_name or config.target.name
    if not REPO_ID.fullmatch(name) or Path(name).exists():
        raise ValueError(
            f"these heads name their target as {name!r}, a folder that nobody else has: push with target_name=, the "
            "target's id on the Hub"
        )
    config = replace(config, target=replace(config.target, name=name))
    weights = Path(folder) / WEIGHTS
    parameters = _count(weights)
    stored = {CONFIG: (json.dumps(config.to_dict(), indent=2) + "\n").encode(), WEIGHTS: weights.read_bytes()}

    api = HfApi(token=token, library_name="headstart")
    with _one_message(repo_id, token):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:
            raise HubError(f"{repo_id} exists and is public: make it private first, or push without private=True")
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        pinned = _pinned(api, repo_id, revision, stored, token)
        if pinned is None:
            pinned = _commit(api, repo_id, revision, stored, "Weights of the heads").oid
        rest = {
            CARD: card(config, repo_id, parameters=parameters, report=report).encode(),
            CODE: custom_code(repo_id, pinned).encode(),
        }
        commit = _commit(api, repo_id, revision, rest, "Card and code for these weights").oid
    return Pushed(repo_id, f"{api.endpoint}/{repo_id}/tree/{commit}", commit, pinned)


def fetch(path_or_repo: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """The local folder of some heads: the one that is named, or a download of the Hub repository's two files.

    Raises:
        FileNotFoundError: it looks like a folder and is none.
        ValueError: a revision of a local folder.
        HubError: no such repository or revision, it holds no heads, no access, or no connection and not in the cache.
    """
    name = str(path_or_repo)
    if Path(name).is_dir():
        if revision is not None:
            raise ValueError(f"{name} is a folder, which has no revision {revision!r}")
        return Path(name)
    if not REPO_ID.fullmatch(name):
        raise FileNotFoundError(f"there is no folder {name}, and it is no Hub id (ORG/NAME) either")
    api = HfApi(token=token, library_name="headstart")
    with _one_message(name, token, revision):
        folder = Path(api.snapshot_download(name, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    missing = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
    if missing:
        raise HubError(f"{name} on the Hub has no {' and no '.join(missing)}: it is not a repository of heads")
    return folder


def custom_code(repo_id: str, commit: str) -> str:
    """``custom_generate/generate.py`` of a repository, which must carry where its weights are."""
    text = (Path(__file__).parent / CODE).read_text(encoding="utf-8")
    for line, value in (("REPOSITORY: str | None = None", repo_id), ("COMMIT: str | None = None", commit)):
        if text.count(f"\n{line}\n") != 1:
            raise ValueError(f"the template {CODE} must have the line {line!r} once")
        text = text.replace(f"\n{line}\n", f"\n{line.removesuffix('None') + json.dumps(value)}\n")
    return text.replace("ORG/HEADS", repo_id)


def _count(weights: Path) -> int:
    """Numbers trained: the floating-point tensors, without the map of the draft vocabulary."""
    try:
        with safe_open(weights, "pt") as file:
            slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 (the file is no mapping)
            return sum(
                math.prod(part.get_shape()) for part in slices if part.get_dtype() in ("F64", "F32", "F16", "BF16")
            )
    except (SafetensorError, FileNotFoundError) as problem:
        raise HeadsFileError(f"{weights} is not a whole safetensors file ({problem}): save the heads again") from None


def _commit(api: HfApi, repo_id: str, revision: str | None, files: Mapping[str, bytes], message: str) -> CommitInfo:
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision)


def _pinned(
    api: HfApi, repo_id: str, revision: str | None, stored: Mapping[str, bytes], token: str | None
) -> str | None:
    """The commit that the repository's code names, when that commit holds the very files to be pushed."""
    try:
        code = hf_hub_download(repo_id, CODE, revision=revision, token=token, endpoint=api.endpoint)
        found = re.search(r'^COMMIT: str \| None = "(\w+)"$', Path(code).read_text(encoding="utf-8"), re.MULTILINE)
        there = api.get_paths_info(repo_id, list(stored), revision=found[1]) if found else []
    except (errors.RemoteEntryNotFoundError, errors.RevisionNotFoundError):
        return None
    held = {item.path: item for item in there if isinstance(item, RepoFile)}
    same = all(path in held and _is(held[path], content) for path, content in stored.items())
    return found[1] if found and same else None


def _is(file: RepoFile, content: bytes) -> bool:
    if file.lfs is not None:
        return file.lfs.sha256 == hashlib.sha256(content).hexdigest()
    return file.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def _one_message(repo_id: str, token: str | None, revision: str | None = None) -> Iterator[None]:
    """Turn what the client raises into one message that says what to do; no message ever holds the token."""
    try:
        yield
    except HubError:
        raise
    except Exception as problem:
        status = getattr(getattr(problem, "response", None), "status_code", None)
        from_client = type(problem).__module__.startswith("httpx")  # the client's own connection errors are no OSError
        if status is None and not from_client and not isinstance(problem, OSError | errors.RevisionResolutionError):
            raise
        raise HubError(_explain(problem, status, repo_id, revision, token)) from None


def _explain(problem: Exception, status: int | None, repo_id: str, revision: str | None, token: str | None) -> str:
    if isinstance(problem, errors.RevisionNotFoundError):
        return f"{repo_id} on the Hub has no revision {revision!r}"
    if isinstance(problem, errors.GatedRepoError):
        return f"{repo_id} is gated: ask for access on its page, and log in with `hf auth login`"
    if isinstance(problem, errors.LocalTokenNotFoundError):
        return "not logged in to the Hub: run `hf auth login`, or pass token="
    if status == 401 and not isinstance(problem, errors.RepositoryNotFoundError):
        return "the Hub does not know this token: log in with `hf auth login`, or pass another token="
    if status == 403:
        return f"this token may not write to {repo_id}: use one with write access to it"
    if isinstance(problem, errors.RepositoryNotFoundError):
        return f"there is no repository {repo_id} on the Hub, or it is private and this token may not see it"
    if status is None:
        return f"cannot reach the Hub for {repo_id}: {_clean(problem, token)}"
    return f"the Hub answered {status} for {repo_id}: {_clean(problem, token)}"


def _clean(problem: Exception, token: str | None) -> str:
    text = " ".join(str(problem).split())[:300]
    return text.replace(token, "<token>") if token else text
