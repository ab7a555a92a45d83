"""The program's own use of PyTorch's profiler: there is room for one at a time, and it goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Others:
    """Knows whether the program profiles itself, and says so before it begins."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._ours = False
        self._before: dict[str, Any] = {}
        self.at_work = False
        self.seen = False

    def begin(self) -> None:
        from torch.autograd import profiler

        self._wrap(profiler, "_prepare_profiler", self._begins)
        self._wrap(profiler, "_enable_profiler", self._begins)
        self._wrap(profiler, "_disable_profiler", self._ends)

    def end(self) -> None:
        from torch.autograd import profiler

        for name, function in self._before.items():
            setattr(profiler, name, function)
        self._before.clear()

    @contextmanager
    def ourselves(self) -> Iterator[None]:
        """What happens meanwhile we do."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _wrap(self, profiler: Any, name: str, tell: Callable[[], None]) -> None:
        function = self._before[name] = getattr(profiler, name)

        def told(*arguments: Any, **options: Any) -> Any:
            if not self._ours:
                tell()
            return function(*arguments, **options)

        setattr(profiler, name, told)

    def _begins(self) -> None:
        self.at_work = self.seen = True
        self._give_way()

    def _ends(self) -> None:
        self.at_work = False
