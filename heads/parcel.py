"""What of a folder is pushed: the files that hold the weights and say what they are, and no local path.

An adapter is pushed as it is, its factors alone. The heads it belongs on are named by repository and commit, after
their hash was held against the adapter's record, or go along in ``base/``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from heads.adapter import Record, check_base, find_base, read_record
from heads.config import HeadsConfig
from heads.hub import REPO_ID, Access, Place
from heads.layout import ADAPTER, BASE, CONFIG, FACTORS, HEADS, WEIGHTS, broken, target_files
from heads.store import read_config

Content = Path | bytes


@dataclass(frozen=True)
class Base:
    """How others find the heads that a pushed adapter belongs on.

    Attributes:
        name: their Hub id (a folder, where they go along); where the adapter's record says when None.
        revision: branch, tag or commit of it; it is the commit that is recorded.
        along: they go along in ``base/``.
    """

    name: str | None = None
    revision: str | None = None
    along: bool = False


@dataclass(frozen=True)
class Parcel:
    """What is uploaded, but for the card and what is drawn for it.

    Attributes:
        config: of the heads, with a target that others can name.
        weights: the file of what was trained.
        stored: contents by their names in the repository.
        base: of an adapter: the heads it belongs on, for people.
    """

    config: HeadsConfig
    weights: Path
    stored: dict[str, Content]
    base: str | None = None


def pack(
    place: Place, repo_id: str, target_name: str | None, base: Base, token: str | None = None, *, ask: bool = True
) -> Parcel:
    """What belongs to some heads, a bundle or an adapter.

    Args:
        ask: the Hub may be asked for an adapter's heads; else they are looked at only where they are a folder.

    Raises:
        ValueError: the target or an adapter's heads are known only by a local path, these are other heads, or ``base``
            was given for what is no adapter.
        OSError: an adapter's heads are not there.
        HeadsFileError: the folder does not hold whole heads.
    """
    if (place.folder / ADAPTER).is_file():
        return _pack_adapter(place, repo_id, target_name, base, token, ask)
    config = named(read_config(place.folder), place, target_name, repo_id)
    if base != Base():
        raise ValueError(f"{place.name} is no adapter, so it belongs on no other heads: leave base and with_base out")
    inside = "" if place.bundle is None else f"{HEADS}/"
    stored = _config_and_weights(inside, config, place)
    if place.bundle is not None:
        names = target_files(place.bundle)
        if (wrong := broken(place.bundle, names)) is not None:
            raise ValueError(f"{wrong}: the target of this bundle is not whole, make it again (`headstart bundle`)")
        files: dict[str, Content] = {name: place.bundle / name for name in names}
        stored = files | stored
    return Parcel(config, place.folder / WEIGHTS, stored)


def _config_and_weights(inside: str, config: HeadsConfig, place: Place) -> dict[str, Content]:
    return {
        inside + CONFIG: (json.dumps(config.to_dict(), indent=2) + "\n").encode(),
        inside + WEIGHTS: place.folder / WEIGHTS,
    }


def _pack_adapter(
    place: Place, repo_id: str, target_name: str | None, base: Base, token: str | None, ask: bool
) -> Parcel:
    record = read_record(place.folder)
    record = replace(record, heads=named(record.heads, place, target_name, repo_id))
    along = base.along or (base.name is None and record.base is None)
    wanted = base.name or record.base
    if not along and is_local(str(wanted)):
        raise ValueError(
            f"the adapter {place.name} belongs on the heads {wanted!r}, a folder that nobody else has: push those and "
            "name their repository with base= (--base), or send them along with with_base=True (--with-base)"
        )
    revision = base.revision or (record.base_revision if base.name is None else None)
    stored: dict[str, Content] = {}
    if ask or wanted is None or Path(wanted).is_dir():
        found = find_base(record, place, wanted, revision, Access(token=token))
        own = check_base(record, place, found)
        if along:
            stored = _config_and_weights(f"{BASE}/", _nameable(own, record, found), found)
        revision = found.commit
    elif along:
        stored = dict.fromkeys((f"{BASE}/{CONFIG}", f"{BASE}/{WEIGHTS}"), b"")  # a dry run says their names alone
    record = replace(record, base=None if along else wanted, base_revision=None if along else revision)
    stored |= {ADAPTER: record.to_bytes(), FACTORS: place.folder / FACTORS}
    return Parcel(record.heads, place.folder / FACTORS, stored, _told(record))


def _told(record: Record) -> str:
    if record.base is None:
        return f"the heads in `{BASE}/` of this repository"
    return f"`{record.base}`" + (f" at revision `{record.base_revision}`" if record.base_revision else "")


def _nameable(own: HeadsConfig, record: Record, found: Place) -> HeadsConfig:
    """The base heads' config; they may be another target's than those that were adapted."""
    if not own.target.differences(record.heads.target):
        return replace(own, target=record.heads.target)
    local = [name for name in (own.target.name, own.target.adapter_name) if name is not None and is_local(name)]
    if local:
        raise ValueError(
            f"the heads {found.name} name their target as {local[0]!r}, a folder that nobody else has: push them to a "
            "repository of their own with target_name=, and name that with base= (--base)"
        )
    return own


def named(config: HeadsConfig, place: Place, target_name: str | None, repo_id: str) -> HeadsConfig:
    """The config with a name of the target that others can go by; a bundle's may be the repository itself."""
    name = target_name or config.target.name
    if is_local(name):
        if place.bundle is None or target_name is not None:
            raise ValueError(
                f"these heads name their target as {name!r}, a folder that nobody else has: push with target_name= "
                "(--target-name), the target's id on the Hub"
            )
        name = repo_id
    adapter = config.target.adapter_name
    if adapter is not None and is_local(adapter):
        raise ValueError(
            f"the target of these heads carries the adapter {adapter!r}, a folder that nobody else has: push it to the "
            "Hub, and train heads on the target with its id"
        )
    return replace(config, target=replace(config.target, name=name))


def is_local(name: str) -> bool:
    """Whether a name is a folder's rather than a Hub id."""
    return not REPO_ID.fullmatch(name) or Path(name).exists()
