"""What a collective leaves in the program's hands until somebody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.streams import Moment


def _hold_up(device: int, moment: Moment | None) -> None:
    """What the program launches next on that device comes after the moment."""
    if moment is not None:
        MACHINE.clock.wait(MACHINE.stream(device), moment)


class Handle(Work):
    """A collective on its way: who waits for it makes its stream wait, and the host goes on."""

    def __init__(self, result: Any, device: int = -1, moment: Moment | None = None) -> None:
        super().__init__()
        self.device, self.moment = device, moment
        self.future = _Future(partial(_hold_up, device, moment))
        self.future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        _hold_up(self.device, self.moment)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.moment is None or MACHINE.clock.query(self.moment)

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        """C++ waits for it when the backward pass ends, and does not tell: what is queued here comes before."""
        with contextlib.suppress(RuntimeError):  # where nothing goes back, who asked for it waits by itself
            torch.autograd.Variable._execution_engine.queue_callback(partial(_hold_up, self.device, self.moment))
        return self.future


class _Future(torch.futures.Future[Any]):  # type: ignore[misc]  # PyTorch is not typed here
    """What a collective gives, for whoever waits for it in Python."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self) -> Any:
        self._wait()
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> Any:
        self._wait()
        return super().then(callback)
