"""What a program begins: the processes that it spawns, and the modules that it imports.

Nothing is imported on its behalf: what it sets before its imports (threads, devices, logs) keeps its meaning.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing.spawn
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from keepbusy.instrument.patches import Patches
from keepbusy.instrument.script import COMPILE

# Processes that the program spawns: each becomes what its parent is before it imports the program again.

CHILD = "KEEPBUSY_SPAWNED"
"""How a spawned child is told what to be: what to call first, with which options, and the script of its parent."""
_FILE = __file__
_SCRIPT, _MODULE = _MAIN = ("init_main_from_path", "init_main_from_name")
"""How Python tells a child which program it belongs to: a file, or with `-m` a module."""


_followed = Patches()
"""What `follow` replaced last."""
_CHILD_CALLS: list[dict[str, Any]] = []
"""What children call besides, once they have begun."""


def follow(begin: Callable[..., object], options: dict[str, Any]) -> Callable[[], None]:
    """From now on spawned children call `begin(**options)` first. What is forked has its parent's state anyway.

    It holds for one `begin` at a time, the last; what is returned puts Python's own way back. An option that is a
    function is asked when a child is spawned.
    """
    _followed.undo()
    child = {"module": begin.__module__, "function": begin.__qualname__}

    def preparing(prepare: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
        def prepared(name: str) -> dict[str, Any]:
            data = prepare(name)
            main = {key: data.pop(key) for key in _MAIN if data.get(key) not in (None, _FILE)}
            then = [{**one, "options": _asked(one["options"])} for one in _CHILD_CALLS]
            os.environ[CHILD] = json.dumps({**child, "options": _asked(options), "then": then, **main})
            return data | {_SCRIPT: _FILE}

        return prepared

    _followed.replace(multiprocessing.spawn, "get_preparation_data", preparing)
    return _followed.undo


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if callable(value) else value for name, value in options.items()}


def follow_with(then: Callable[..., object], **options: Any) -> None:
    """To be called in spawned children that are followed, once they have begun."""
    _CHILD_CALLS.append({"module": then.__module__, "function": then.__qualname__, "options": options})


def _be_child(child: dict[str, Any], names: dict[str, Any]) -> None:
    """Python runs this file in place of the script: become what the parent is, then be the script as Python would."""
    for one in (child, *child["then"]):
        begin = getattr(import_module(one["module"]), one["function"])
        begin(**one["options"])
    script, module = child.get(_SCRIPT), child.get(_MODULE)
    main: dict[str, Any] = {}
    if script is not None and script.endswith(".py"):
        code = COMPILE[-1](Path(script).read_bytes(), script)
        main = runpy._run_module_code(code, None, "__mp_main__", pkg_name="", script_name=script)  # type: ignore[attr-defined]
    elif script is not None:
        main = runpy.run_path(script, run_name="__mp_main__")
    elif module is not None and module.rpartition(".")[2] != "__main__":
        main = runpy.run_module(module, run_name="__mp_main__", alter_sys=True)
    names.clear()
    names.update(main)


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` right after the program's own import of the module; at once if it has been imported already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Expected(name, then))


class _Expected:
    """Asked first for every import, it answers for one module only, until that is run.

    Many ask where a module is and do not import it then: `find_spec("torch")` is how others learn that it is installed.
    """

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then
        self._asking = set[int]()
        """Threads that are asking those who know modules."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        thread = threading.get_ident()
        if name != self._name or thread in self._asking:
            return None
        self._asking.add(thread)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(thread)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: object) -> None:
        """The loader is this module's own. It stays what it is, but for the one time when the module is run."""
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # of several who follow it, the first has taken it away
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            self._then()

        loader.exec_module = exec_module  # type: ignore[attr-defined]


if __name__ == "__mp_main__" and CHILD in os.environ:  # last, for all names go that are not the program's
    _be_child(json.loads(os.environ[CHILD]), globals())
