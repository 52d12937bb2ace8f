"""The Hugging Face Hub: what is fetched of a repository of heads, and one message for whatever goes wrong there.

What comes down is configuration, safetensors and a bundled target's tokenizer; nothing that could run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, get_token

from heads.layout import ADAPTER, BASE, CONFIG, FACTORS, HEADS, SHARDS, TARGET, WEIGHTS, is_bundle, target_files

# as the Hub itself takes them: a path such as ../x or a/b.git is none
REPO_ID = re.compile(r"(?!.*(?:--|\.\.))(?:\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b(?<!\.git)", re.ASCII)
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]+|(?<=Bearer )[^\s'\"\\]+")  # in a message, whoever wrote it


class HubError(OSError):
    """The Hub refused, or could not be reached; one message that says what to do."""


@dataclass(frozen=True)
class Access:
    """How a repository is reached.

    Attributes:
        revision: branch, tag or commit; the newest of the main branch when None.
        cache_dir: folder of downloads; huggingface_hub's own (``HF_HOME``) when None.
        local_files_only: take what is in the cache and ask nobody, as under ``HF_HUB_OFFLINE=1``.
        token: as huggingface_hub takes it; None is the one that is logged in.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    token: str | None = field(default=None, repr=False)

    def of_target(self) -> dict[str, Any]:
        """Arguments that reach a target in the same way; its revision is its own."""
        given = {"cache_dir": self.cache_dir, "token": self.token, "local_files_only": self.local_files_only}
        return {key: value for key, value in given.items() if value}


ANYHOW = Access()
_NOT_CACHED = (
    "{} is not in the cache and the Hub may not be asked (HF_HUB_OFFLINE, or local_files_only): fetch it once with a "
    "connection"
)


@dataclass(frozen=True)
class Place:
    """Where some heads lie on this machine.

    Attributes:
        name: as it was asked for.
        folder: holds config.json and heads.safetensors; or adapter.json and adapter.safetensors, of an adapter.
        bundle: the folder around it that also holds their target, None for heads alone.
        commit: of the Hub repository, None for a folder.
    """

    name: str
    folder: Path
    bundle: Path | None = None
    commit: str | None = None


def locate(path_or_repo: str | Path, access: Access = ANYHOW, *, subfolder: str | None = None) -> Place:
    """Find heads: a folder of them, a bundle, an adapter, or a Hub repository of any, of which their files alone are
    downloaded.

    Raises:
        FileNotFoundError, NotADirectoryError: it looks like a folder and is none.
        ValueError: a revision of a local folder.
        HubError: no such repository or revision, it holds no heads, no access, or no connection and not in the cache.
    """
    name, inside = str(path_or_repo), subfolder or ""
    if Path(name).is_dir():
        if access.revision is not None:
            raise ValueError(f"{name} is a folder, which has no revision {access.revision!r}")
        return _place(name, Path(name) / inside, None)
    if Path(name).exists():  # the Hub is not asked for what lies here
        raise NotADirectoryError(f"{name} is a file: name the folder that holds config.json and {WEIGHTS}")
    prefix = f"{inside}/" if inside else ""
    files = [f"{prefix}{folder}{file}" for folder in ("", f"{HEADS}/", f"{BASE}/") for file in (CONFIG, WEIGHTS)]
    root = download(name, [*files, prefix + ADAPTER, prefix + FACTORS], access)
    place = _place(name, root / inside, root.name)
    needed = (ADAPTER, FACTORS) if (place.folder / ADAPTER).is_file() else (CONFIG, WEIGHTS)
    missing = [file for file in needed if not (place.folder / file).is_file()]
    if missing:
        where = f"{name} on the Hub" + (f" in {inside}/" if inside else "")
        raise HubError(f"{where} has no {' and no '.join(missing)}: it is not a repository of heads")
    return place


def _place(name: str, root: Path, commit: str | None) -> Place:
    return Place(name, root / HEADS, root, commit) if is_bundle(root) else Place(name, root, None, commit)


def fetch(path_or_repo: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """The local folder with the config.json and heads.safetensors of some heads; see :func:`locate`."""
    return locate(path_or_repo, Access(revision=revision, token=token)).folder


def fetch_target(place: Place, access: Access) -> Path:
    """The folder of a bundle's target, downloaded at the commit that its heads came from.

    Raises:
        ValueError: it is not whole, not of safetensors, or its index names files outside.
    """
    assert place.bundle is not None, "only a bundle has one"
    folder = place.bundle
    if place.commit is not None:
        inside = folder.relative_to(_snapshot(folder, place.commit)).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        at_commit = Access(place.commit, access.cache_dir, access.local_files_only, access.token)
        folder = download(place.name, [prefix + name for name in (*TARGET, SHARDS)], at_commit) / inside
    target_files(folder)
    return folder


def _snapshot(folder: Path, commit: str) -> Path:
    return next(path for path in (folder, *folder.parents) if path.name == commit)


def download(repo_id: str, patterns: list[str], access: Access = ANYHOW) -> Path:
    """The snapshot's folder with those files of a repository that ``patterns`` name; its name is the commit.

    Raises:
        FileNotFoundError: the name is no Hub id.
        HubError: see :func:`locate`.
    """
    if not REPO_ID.fullmatch(repo_id):
        raise FileNotFoundError(f"there is no folder {repo_id}, and it is no Hub id (ORG/NAME) either")
    api = HfApi(token=access.token, library_name="headstart")
    with one_message(repo_id, access.token, access.revision):
        found = api.snapshot_download(
            repo_id,
            revision=access.revision,
            allow_patterns=patterns,
            cache_dir=access.cache_dir,
            local_files_only=access.local_files_only,
        )
    return Path(found)


def list_files(repo_id: str, access: Access = ANYHOW) -> list[str]:
    """Names of a repository's files.

    Raises:
        HubError: see :func:`locate`.
    """
    if access.local_files_only:
        raise HubError(_NOT_CACHED.format(repo_id))
    with one_message(repo_id, access.token, access.revision):
        return HfApi(token=access.token, library_name="headstart").list_repo_files(repo_id, revision=access.revision)


@contextmanager
def one_message(repo_id: str, token: str | None = None, revision: str | None = None) -> Iterator[None]:
    """Turn what the Hub's client raises, also under another library's error, into one message that says what to do.

    No message ever holds the token. Errors that are not the client's pass unchanged.
    """
    try:
        yield
    except HubError:
        raise
    except Exception as problem:
        found = _of_client(problem)
        if found is None:
            raise
        raise HubError(_explain(found, repo_id, revision, token)) from None


def _of_client(problem: BaseException) -> BaseException | None:
    """The first error of the Hub's client (or of the HTTP library under it) in a chain of causes.

    That a file is missing says less than the error which another library made of it.
    """
    chain = [problem]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    of_client = [each for each in chain if _by_client(each)]
    if of_client and isinstance(of_client[0], errors.RemoteEntryNotFoundError) and of_client[0] is not problem:
        return None
    return of_client[0] if of_client else None


def _by_client(problem: BaseException) -> bool:
    """Its own errors and those of the HTTP library; and what its storage client, which is no Python, raises: a plain
    ConnectionError or RuntimeError."""
    if type(problem).__module__.startswith(("huggingface_hub", "httpx")):
        return True
    return isinstance(problem, ConnectionError | TimeoutError) or (
        isinstance(problem, RuntimeError) and _raised_in(problem).startswith("huggingface_hub")
    )


def _raised_in(problem: BaseException) -> str:
    """The module."""
    step = problem.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return str(step.tb_frame.f_globals.get("__name__", "")) if step is not None else ""


def _explain(problem: BaseException, repo_id: str, revision: str | None, token: str | None) -> str:
    if isinstance(problem, errors.HFValidationError):
        return f"there is no folder {repo_id}, and it is no Hub id (ORG/NAME) either"
    status = getattr(getattr(problem, "response", None), "status_code", None)
    offline = isinstance(problem, errors.OfflineModeIsEnabled) or (
        isinstance(problem, errors.LocalEntryNotFoundError) and _asked_for_the_cache_alone(problem)
    )
    if offline:
        return _NOT_CACHED.format(repo_id)
    if isinstance(problem, errors.RevisionNotFoundError):
        return f"{repo_id} on the Hub has no revision {revision!r}"
    if isinstance(problem, errors.GatedRepoError):
        return f"{repo_id} is gated: ask for access on its page, and log in with `hf auth login`"
    unknown = status == 401 and not isinstance(problem, errors.RepositoryNotFoundError)
    if isinstance(problem, errors.LocalTokenNotFoundError) or (unknown and token is None and get_token() is None):
        return "not logged in to the Hub: run `hf auth login`, or pass token="
    if unknown:
        return "the Hub does not know this token: log in with `hf auth login`, or pass another token="
    if status == 403:
        what = "read" if _method(problem) in ("GET", "HEAD") else "write to"
        return f"this token may not {what} {repo_id}: use one with {what.partition(' ')[0]} access to it"
    if isinstance(problem, errors.RepositoryNotFoundError):
        return f"there is no repository {repo_id} on the Hub, or it is private and this token may not see it"
    if token is not None and not token.isprintable():  # the client does not send it, and would show it
        return "this token cannot be sent: it holds a line end or what is no text; pass token= without"
    if status is None:
        return f"cannot reach the Hub for {repo_id}: {_clean(problem, token)}"
    return f"the Hub answered {status} for {repo_id}: {_clean(problem, token)}"


def _method(problem: BaseException) -> str | None:
    """Of the HTTP request that was refused."""
    return getattr(getattr(getattr(problem, "response", None), "request", None), "method", None)


def _asked_for_the_cache_alone(problem: BaseException) -> bool:
    """The client tells a missing connection from a forbidden one by its cause alone."""
    cause = problem.__cause__ or problem.__context__
    return cause is None or isinstance(cause, errors.OfflineModeIsEnabled)


def _clean(problem: BaseException, token: str | None) -> str:
    """Its first words, without the token that was given, or any that the client found by itself."""
    text = TOKEN.sub("<token>", " ".join(str(problem).split()))
    return (text.replace(token.strip(), "<token>") if token and token.strip() else text)[:300]
