"""What a wheel requires on this machine, for pip: all of it except torch and its companions.

The serving check installs vLLM's CPU build beside a torch that is already there; its own pins name builds of torch
that only another index has.

    python requirements.py WHEEL > requirements.txt
"""

from __future__ import annotations

import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement

THERE = {"torch", "torchaudio", "torchvision", "torchcodec"}  # installed before, or for sound and pictures only


def required(wheel: Path) -> list[str]:
    """Requirements of a wheel that hold here and without extras, one for pip's requirements file each."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = message_from_bytes(archive.read(metadata))
    found = [Requirement(line) for line in message.get_all("Requires-Dist") or []]
    return [
        str(each)
        for each in found
        if each.name not in THERE and (not each.marker or each.marker.evaluate({"extra": ""}))
    ]


if __name__ == "__main__":
    print("\n".join(required(Path(sys.argv[1]))))
