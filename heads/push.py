"""Upload heads, alone or with their target: what belongs, named file by file, and nothing else that lies in a folder.

A push is two commits: the weights, then the card and the code that names the first one's id. Files that had arrived
before a push was cut short are not sent again, and pushing the same heads again makes no commit.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, errors
from safetensors import safe_open

from heads.adapter import save_adapter
from heads.card import card
from heads.config import HeadsConfig
from heads.hub import REPO_ID, HubError, locate, one_message
from heads.layout import BASE, CARD, CERTIFICATE, CODE, CONFIG, FACTORS, HEADS, INDEX, WEIGHTS, belongs
from heads.parcel import Base, Content, pack
from heads.plots import plots
from heads.reports import gather, published, read_reports
from heads.store import HeadsFileError, count_parameters, weights_digest
from heads.tuned import without_adapter

if TYPE_CHECKING:
    from heads.base import DraftHeads

SECRET = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")


@dataclass(frozen=True)
class Pushed:
    """What a push left behind, or with ``dry_run`` would.

    Attributes:
        repo_id, url: the repository, and its new state.
        commit, weights_commit: of that state, and of the weights.
        files: what belongs to it.
        left: what else lies in the folder, and stays there.
    """

    repo_id: str
    url: str
    commit: str
    weights_commit: str
    files: tuple[str, ...]
    left: tuple[str, ...]


def push(
    heads: DraftHeads,
    repo_id: str,
    *,
    bundle: bool = False,
    tokenizer: Any = None,
    base: str | None = None,
    with_base: bool = False,
    **options: Any,
) -> str:
    """Upload heads; see :func:`push_folder`. Returns the URL of the repository at the commit that was made.

    Args:
        bundle: together with their target and its ``tokenizer``.
        base, with_base: of heads with an adapter on them: the adapter is pushed alone, beside the heads it belongs on
            or with their Hub id. Without either, heads and factors are pushed as one.
    """
    with tempfile.TemporaryDirectory(prefix="headstart-push-") as folder:
        place = Path(folder) / "heads"
        if base is None and not with_base:
            heads.save_pretrained(place, bundle=bundle, tokenizer=tokenizer)
            return push_folder(place, repo_id, **options).url
        if bundle:
            raise ValueError("a bundle holds a target and whole heads: merge the adapter, or push it without bundle")
        save_adapter(heads, place, base)
        if with_base:
            without_adapter(heads).save_pretrained(place / BASE)
            base = str(place / BASE)
        return push_folder(place, repo_id, base=base, with_base=with_base, **options).url


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    report: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    revision: str | None = None,
    target_name: str | None = None,
    token: str | None = None,
    with_plots: bool = True,
    base: str | None = None,
    base_revision: str | None = None,
    with_base: bool = False,
    dry_run: bool = False,
) -> Pushed:
    """Upload a folder that ``save_pretrained`` wrote. Pushing the same heads again makes no new commit.

    Args:
        folder: of heads, a bundle, or an adapter; a certificate.json in it goes along if it is these weights' own.
        repo_id: ``ORG/NAME``; made when it does not exist.
        private: of a repository that is made; one that exists must already be private when True.
        report: for the card: what the verbs of this project reported, see :mod:`heads.reports`.
        revision: branch to push to, made when it does not exist; the main one when None.
        target_name: the target's Hub id, for heads trained on a local copy of it.
        token: as huggingface_hub takes it; None is the one that is logged in.
        with_plots: draw what was measured; needs matplotlib.
        base, base_revision: of an adapter: the Hub id and revision of the heads it belongs on; where its record says
            when None. Their weights are held against the record, and their commit is written into it.
        with_base: of an adapter: those heads go along, in ``base/``.
        dry_run: say what would be uploaded, and ask the Hub nothing.

    Raises:
        ValueError: the target, or an adapter's heads, are known only by a local path, those heads are other ones, the
            weights cannot be read, a report is of other heads, something to be uploaded holds an access token, or plots
            cannot be drawn.
        HubError: the Hub refused or could not be reached.
        HeadsFileError: the folder does not hold whole heads, or they hold numbers that are not finite.
    """
    if not REPO_ID.fullmatch(repo_id):
        raise ValueError(f"{repo_id} is no Hub id: it must be ORG/NAME")
    place = locate(folder)
    parcel = pack(place, repo_id, target_name, Base(base, base_revision, with_base), token, ask=not dry_run)
    config, stored = parcel.config, parcel.stored
    parameters = count_parameters(parcel.weights)
    _refuse_odd_numbers(parcel.weights)
    digest = weights_digest(place.folder)
    root = place.bundle or place.folder
    reports = [report] if isinstance(report, Mapping) else report
    measured = gather([*_certificate(root), *reports], digest)
    pictures = plots(measured) if with_plots else {}

    def written(repo_id: str, licence: str | None) -> dict[str, Content]:
        """The card and what it shows."""
        said = published(measured, repo_id, config, licence)
        bundled = place.bundle is not None
        text = card(config, repo_id, parameters=parameters, report=said, bundle=bundled, base=parcel.base)
        found: dict[str, Content] = {CARD: text.encode(), **pictures}
        if "certificate" in said:
            found[CERTIFICATE] = (json.dumps(said["certificate"], indent=2) + "\n").encode()
        return found

    _refuse_secrets(stored | written(repo_id, None))  # as a report that no card can show: before anything is made
    planned = (*stored, CARD, CODE, *([CERTIFICATE] if "certificate" in measured else []), *pictures)
    left = _left(root, planned)
    if dry_run:
        return Pushed(repo_id, "", "", "", planned, left)

    api = HfApi(token=token, library_name="headstart")
    with one_message(repo_id, token):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:
            raise HubError(f"{repo_id} exists and is public: make it private first, or push without private=True")
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = set(api.list_repo_files(repo_id, revision=revision))
        _refuse_strangers(repo_id, there)
        rest = written(repo_id, _licence(api, config))
        stale = sorted(name for name in there - set(planned) if belongs(name))
        pinned = _pinned(api, repo_id, revision, stored, there)
        if pinned is None:
            pinned, stale = _commit(api, repo_id, revision, stored, "Weights of the heads", stale).oid, []
        rest[CODE] = custom_code(repo_id, pinned).encode()
        commit = _commit(api, repo_id, revision, rest, "Card and code for these weights", stale).oid
    return Pushed(repo_id, f"{api.endpoint}/{repo_id}/tree/{commit}", commit, pinned, planned, left)


def _certificate(root: Path) -> list[Mapping[str, Any]]:
    return read_reports([root / CERTIFICATE]) if (root / CERTIFICATE).is_file() else []


def _left(root: Path, planned: Sequence[str]) -> tuple[str, ...]:
    """What lies in the folder and is not uploaded, the first names only of a folder inside it."""
    held = {f"{HEADS}/" if name.startswith(f"{HEADS}/") else name.partition("/")[0] for name in planned}
    found = [path.name + ("/" if path.is_dir() else "") for path in sorted(root.iterdir())]
    return tuple(name for name in found if name not in held and name.rstrip("/") not in held)


def _refuse_strangers(repo_id: str, there: set[str]) -> None:
    """A push replaces and takes away files, so it goes only where heads are, or nothing is yet."""
    models = sorted(there & {CONFIG, "model.safetensors", INDEX})
    if models and not there & {WEIGHTS, FACTORS, f"{HEADS}/{WEIGHTS}"}:
        raise ValueError(
            f"{repo_id} holds {', '.join(models)} and no heads: it is somebody's model. Push heads to a repository of "
            "their own, or target and heads together to a new one (`headstart bundle`)"
        )


def _refuse_odd_numbers(path: Path) -> None:
    """Heads with NaN or infinity in them draft nothing; one tensor is in memory at a time."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no mapping)
            value = file.get_tensor(name)
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise HeadsFileError(f"{path}: {name} holds NaN or infinity: train these heads again")


def _refuse_secrets(files: Mapping[str, Content]) -> None:
    """No access token leaves this machine inside a text."""
    for name, content in files.items():
        if name.endswith((".safetensors", ".png")):
            continue
        if SECRET.search(content if isinstance(content, bytes) else content.read_bytes()):
            raise ValueError(f"{name} holds what looks like an access token of the Hub: take it out before pushing")


def custom_code(repo_id: str, commit: str) -> str:
    """``custom_generate/generate.py`` of a repository, which must carry where its weights are."""
    text = (Path(__file__).parent / CODE).read_text(encoding="utf-8")
    for line, value in (("REPOSITORY: str | None = None", repo_id), ("COMMIT: str | None = None", commit)):
        if text.count(f"\n{line}\n") != 1:
            raise ValueError(f"the template {CODE} must have the line {line!r} once")
        text = text.replace(f"\n{line}\n", f"\n{line.removesuffix('None') + json.dumps(value)}\n")
    return text.replace("ORG/HEADS", repo_id)


def _licence(api: HfApi, config: HeadsConfig) -> str | None:
    """The target's licence as its repository's card states it; None where that cannot be told."""
    try:
        data = api.model_info(config.target.name).card_data
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return None
    found = data.get("license") if data is not None else None
    return str(found) if found else None


def _commit(
    api: HfApi,
    repo_id: str,
    revision: str | None,
    files: Mapping[str, Content],
    message: str,
    stale: Sequence[str] = (),
) -> CommitInfo:
    operations: list[Any] = [CommitOperationAdd(path, content) for path, content in files.items()]
    operations += [CommitOperationDelete(path) for path in stale]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision)


def _pinned(
    api: HfApi, repo_id: str, revision: str | None, stored: Mapping[str, Content], there: set[str]
) -> str | None:
    """The commit that the repository's code names, when that commit holds the very files to be pushed, no others."""
    if CODE not in there:
        return None
    try:
        code = api.hf_hub_download(repo_id, CODE, revision=revision)
        found = re.search(r'^COMMIT: str \| None = "(\w+)"$', Path(code).read_text(encoding="utf-8"), re.MULTILINE)
        listed = api.get_paths_info(repo_id, list(stored), revision=found[1]) if found else []
    except errors.RevisionNotFoundError:
        return None
    held = {item.path: item for item in listed if isinstance(item, RepoFile)}
    same = all(path in held and _is(held[path], content) for path, content in stored.items())
    return found[1] if found and same else None


def _is(file: RepoFile, content: Content) -> bool:
    if file.lfs is not None:
        return file.lfs.sha256 == _sha256(content)
    data = content if isinstance(content, bytes) else content.read_bytes()
    return file.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha256(content: Content) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = ["Pushed", "custom_code", "push", "push_folder"]
