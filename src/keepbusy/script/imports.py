"""What is to happen once the program itself imports a module.

Nothing is imported on the program's behalf: what it sets before its imports (threads, devices, logs) keeps its meaning.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` right after the program's own import of the module; at once if it has been imported already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Expected(name, then))


class _Expected:
    """Asked first for every import, it answers for one module only, and once."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)  # what comes now is for those who know modules
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, self._then)
        return spec


def _follow(loader: object, then: Callable[[], object]) -> None:
    """The loader is this module's own. It stays what it is, but for the one time when the module is run."""
    execute = loader.exec_module  # type: ignore[attr-defined]

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # type: ignore[attr-defined]
        execute(module)
        then()

    loader.exec_module = exec_module  # type: ignore[attr-defined]
