"""The peers and their environments: each has its own, made by pip once and kept in a folder that the user can name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from heads.embedded import cache_root


@dataclass(frozen=True)
class Peer:
    """Another project's trainer.

    Attributes:
        package, version: on the package index; ``needs`` are further requirements, apart by blanks.
        unneeded: packages that it requires and never imports, apart by blanks; they are removed again, since builds for
            another torch break what looks at them.
        module: what its Python runs, in ``inside/``.
        reads_states: it does not run the target itself.
        norms: it knows EAGLE-3.1's ``fc_norm`` and ``norm_output``.
    """

    package: str
    version: str
    module: str
    reads_states: bool
    norms: bool
    needs: str = ""
    unneeded: str = ""

    @property
    def requirements(self) -> list[str]:
        """What pip is asked for: the same torch as ours, so that only the trainers differ."""
        return [f"torch=={torch.__version__.partition('+')[0]}", f"{self.package}=={self.version}", *self.needs.split()]


TRANSFORMERS = f"transformers=={transformers.__version__}"  # speculators asks for one below 5.20 itself
PEERS = {
    peer.package: peer
    for peer in (
        Peer("economize", "0.3.2", "inside.economize", reads_states=False, norms=False, needs=TRANSFORMERS),
        Peer(
            "speculators",
            "0.9.0",
            "inside.speculators",
            reads_states=True,
            norms=True,
            unneeded="torchvision torchaudio",
        ),
    )
}


def default_root() -> Path:
    """Where environments lie unless the user says otherwise."""
    return cache_root() / "peers"


def python_of(peer: Peer, root: Path, say: Callable[[str], None]) -> Path:
    """The Python of a peer's environment under ``root``, which is made first where it is missing.

    Raises:
        OSError: it could not be made; with what pip said.
    """
    folder = root / f"{peer.package}-{peer.version}-torch-{torch.__version__.partition('+')[0]}"
    if not folder.is_dir():
        say(f"environment of {peer.package} {peer.version}: {folder} (made once, a few minutes)")
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        try:
            _build(peer, partial)
            partial.rename(folder)  # its Python finds itself by the folder it lies in
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder / "bin" / "python"


def _build(peer: Peer, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "--quiet", "install", *peer.requirements])
    if peer.unneeded:
        _run([*pip, "--quiet", "uninstall", "--yes", *peer.unneeded.split()])
    # not with --quiet, which leaves out the list as well
    held = json.loads(_run([*pip, "list", "--format", "json"]))
    packages = {package["name"]: package["version"] for package in held}
    (folder / "packages.json").write_text(json.dumps(packages, indent=1) + "\n", encoding="utf-8")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(
            f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:].strip()}"
        )
    return done.stdout
