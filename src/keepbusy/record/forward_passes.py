"""Forward passes: the calls of modules that stand in no other module's call.

PyTorch's own global hook would make every module slower that the program has. A wrapper around `__call__` is cheaper,
and it stays around the outermost modules only, once they are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepbusy.record.patches import Function, Patches

LEARNED = 64
"""After so many forward passes it is known which kinds of modules stand outermost."""


class ForwardPasses:
    """Calls `passed(module)` after each of them."""

    def __init__(self, passed: Callable[[Any], object]) -> None:
        self._passed = passed
        self._inside = False
        self._outermost: set[type] = set()
        self._patches = Patches()

    def begin(self) -> None:
        from torch.nn import Module

        self._left = LEARNED
        self._wrap(Module)

    def end(self) -> None:
        self._patches.undo()

    def _wrap(self, kind: type) -> None:
        self._patches.replace(kind, "__call__", self._called)

    def _called(self, original: Function) -> Function:
        from torch.compiler import is_compiling

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._inside:  # the compiler sees nothing but the call itself
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._inside = False
            self._ended(module)
            return result

        return called

    def _ended(self, module: Any) -> None:
        if self._left:
            self._learn(type(module))
        self._passed(module)

    def _learn(self, kind: type) -> None:
        self._outermost.add(kind)
        self._left -= 1
        if not self._left:
            self._patches.undo()
            for kind in self._outermost:
                self._wrap(kind)
