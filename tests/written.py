"""Commands and code out of written text: what stands in its fenced blocks, as a reader would paste it."""

from __future__ import annotations

import re
import shlex


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages ("" for none named)."""
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if name in languages]


def commands(text: str, language: str = "bash") -> list[list[str]]:
    """Commands of shell blocks, as words; lines that go on behind a backslash or an open quote are one."""
    found, pending = [], ""
    for line in "\n".join(blocks(text, language)).splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is open
            pending += "\n"
            continue
        pending = ""
        if words:
            found.append(words)
    assert not pending, f"an open quote: {pending[:80]}"
    return found
