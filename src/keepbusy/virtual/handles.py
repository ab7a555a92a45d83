"""What a collective gives the program to wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import Work

from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.streams import Moment


class Handle(Work):
    """A collective on its way: who waits for it makes its stream wait, and the host goes on."""

    def __init__(self, result: Any, device: int, moment: Moment | None) -> None:
        super().__init__()
        self.device, self.moment = device, moment
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        if self.moment is not None:
            MACHINE.clock.wait(MACHINE.stream(self.device), self.moment)
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
        self.wait()
        return self.future
