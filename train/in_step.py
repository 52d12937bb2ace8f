"""Passes of a target whose weights are spread over the processes: all of them have to take part in each.

Where every process makes as many passes as the others nothing is needed. Where they do not (prompts that end sooner,
files of unequal size), each pass is announced, and a process with nothing left to do goes along with those of others::

    process 0    pass ─ pass ─ pass ─ done ─ along ─ along ─ done
    process 1    pass ─ pass ─ pass ─ pass ─ pass ── done
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from heads.target import Target
from train.ranks import Ranks
from train.spread import spread_target


class InStep:
    """Context in which processes may make unequally many passes of the target; each then calls :meth:`along`.

    It does nothing where the target is whole in every process, or there is only one.
    """

    def __init__(self, target: Target, ranks: Ranks) -> None:
        self.target, self.ranks = target, ranks
        self.needed = ranks.count > 1 and spread_target(target)
        self._quiet = False
        self._hook: Any = None

    def __enter__(self) -> InStep:
        if self.needed:
            # before the engine's own hooks, which talk to the other processes too
            self._hook = self.target.model.register_forward_pre_hook(self._announce, prepend=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _announce(self, *_: Any) -> None:
        if not self._quiet:
            self.ranks.add([1.0])

    def along(self) -> None:
        """Make passes whose results nobody reads until no process has one left."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        self._quiet = True
        try:
            while self.needed and self.ranks.add([0.0])[0]:
                self.target.forward(token)
        finally:
            self._quiet = False
