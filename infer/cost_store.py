"""Cost tables on disk: measured once for a machine, target and drafter, and the same from then on.

A seeded call chooses its drafts by such a table instead of the clock, so that the same seed gives the same text.
Tables lie in ``costs/`` of the cache folder (``$HEADSTART_CACHE`` or ``~/.cache/headstart``), one JSON file each;
deleting one has it measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.embedded import cache_root
from heads.target import Target
from infer.costs import measure_costs, settings
from infer.drafters import Drafter
from infer.lookahead import CostTable

CONTEXT, REPEATS = 96, 3
ROWS, WIDTHS = (1, 2, 4, 8, 16, 32), (1, 8)


def stored_costs(target: Target, drafter: Drafter, prompt: Tensor) -> CostTable:
    """The table for this machine, target and drafter, measured and stored first if there is none.

    Args:
        prompt: (1, n) any ids of the target's; what is measured is timed behind them.

    Raises:
        OSError: the cache folder cannot be written.
        ValueError: the stored file is not a table, or the target has too few positions to measure anything.
    """
    where = place(target, drafter)
    if not where.is_file():
        _write(where, _measure(target, drafter, prompt))
    try:
        return CostTable.from_dict(json.loads(where.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError) as wrong:
        raise ValueError(f"{where} is not a cost table ({wrong}): delete it, and it is measured again") from None


def place(target: Target, drafter: Drafter) -> Path:
    """The file of a table; everything that its figures depend on is in its name's hash."""
    key = json.dumps(_key(target, drafter), sort_keys=True)
    return cache_root() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _key(target: Target, drafter: Drafter) -> dict[str, Any]:
    return {
        "machine": _machine(target.device),
        "target": [target.name, type(target.model).__name__, _size([target.model]), target.vocab_size],
        "drafter": _described(drafter),
        **settings(target),
    }


def _machine(device: torch.device) -> list[str | int | None]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device)]
    return [platform.machine(), _processor(), os.cpu_count()]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _described(drafter: Drafter) -> list[Any]:
    """Its class, shape and the size of what it runs, and the same of drafters it is made of."""
    parts: list[Any] = [type(drafter).__name__, list(drafter.taps), drafter.lookahead]
    modules = []
    for name, value in vars(drafter).items():
        told = isinstance(value, str | tuple) and not any(isinstance(each, Drafter) for each in value)
        if told and not name.startswith("_"):  # such as the layers that draft
            parts.append([name, str(value)])
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Target):
                modules.append(each.model)
            elif isinstance(each, nn.Module):
                modules.append(each)
            elif isinstance(each, Drafter):
                parts.append(_described(each))
    return [*parts, _size(modules)]


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _measure(target: Target, drafter: Drafter, prompt: Tensor) -> CostTable:
    rows, context = [*ROWS], CONTEXT
    if target.max_positions is not None:
        context = max(1, min(CONTEXT, target.max_positions // 4))
        trees = 2 * 3 * (drafter.lookahead + 1)  # what the drafts to time may need
        while len(rows) > 2 and context + max(2 + sum(rows), 2 + trees) > target.max_positions:
            rows.pop()
    ids = prompt.repeat(1, -(-context // prompt.shape[1]))[:, :context]
    return measure_costs(target, drafter, ids, rows=rows, widths=WIDTHS, repeats=REPEATS)


def _write(where: Path, table: CostTable) -> None:
    """Whole or not at all, and never over a table that another process stored meanwhile."""
    where.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{where.stem}-", dir=where.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(table.to_dict(), file, indent=2)
        Path(partial).chmod(0o644)
        if not where.exists():
            os.replace(partial, where)
    finally:
        Path(partial).unlink(missing_ok=True)
