"""The processes of a run as the rest of train/ sees them: who am I, wait, share, add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object


class Ranks:
    """This process among all processes of the run; alone without an accelerator.

    Attributes:
        index, count: number of this process, and of all.
        main: whether it is the one that writes and prints.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
        self.index = accelerator.process_index if accelerator else 0
        self.count = accelerator.num_processes if accelerator else 1
        self.main = self.index == 0

    def wait(self) -> None:
        """Until all are here."""
        if self._accelerator:
            self._accelerator.wait_for_everyone()

    def share(self, value: Any) -> Any:
        """The main process's ``value``, everywhere."""
        if self.count == 1:
            return value
        return broadcast_object_list([value])[0]

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, in float64."""
        if self.count == 1:
            return [float(value) for value in values]
        assert self._accelerator is not None
        summed: Any = self._accelerator.reduce(
            torch.tensor(list(values), dtype=torch.float64, device=self._accelerator.device), "sum"
        )
        return [float(value) for value in summed.tolist()]

    def collect(self, value: Any) -> list[Any]:
        """Every process's ``value``, in their order, everywhere."""
        if self.count == 1:
            return [value]
        return list(gather_object([value]))

    def on_main(self, action: Callable[[], object], doing: str) -> None:
        """Do something on the main process, while the others wait.

        Raises:
            OSError: on every process, when it failed.
        """
        error: Exception | None = None
        try:
            if self.main:
                action()
        except OSError as caught:
            error = caught
        self.all_succeed(error, doing)

    def all_succeed(self, error: BaseException | None, doing: str) -> None:
        """Raise on every process if ``doing`` failed on any, so that none waits for one that has given up.

        Raises:
            OSError: with this process's own error as its cause where there is one.
        """
        failed = int(self.add([float(error is not None)])[0])
        if error is not None:
            raise OSError(f"{doing} failed: {error}") from error
        if failed:
            raise OSError(f"{doing} failed on {failed} of {self.count} processes")
