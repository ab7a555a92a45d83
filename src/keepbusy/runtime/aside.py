"""Eager calls on a stream of their own, the one that captures use: autograd remembers where a weight was first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keepbusy.runtime.call import Call


class Aside:
    """Runs a step there; whoever called goes on when it is done, in the order of streams."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.stream = step, torch.cuda.Stream()

    def run(self, call: Call) -> Any:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return call.run(self.step)
        finally:
            current.wait_stream(self.stream)
