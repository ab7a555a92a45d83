"""Processes that the program spawns: each becomes what its parent is before it imports the program again."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import runpy
from collections.abc import Callable
from importlib import import_module
from typing import Any

CHILD = "KEEPBUSY_SPAWNED"
"""How a spawned child is told what to be: what to call first, with which options, and the script of its parent."""
_FILE = __file__
_SCRIPT, _MODULE = _MAIN = ("init_main_from_path", "init_main_from_name")
"""How Python tells a child which program it belongs to: a file, or with `-m` a module."""


def follow(begin: Callable[..., object], options: dict[str, Any]) -> None:
    """From now on spawned children call `begin(**options)` first. What is forked has its parent's state anyway."""
    prepare = multiprocessing.spawn.get_preparation_data
    told = {"module": begin.__module__, "function": begin.__qualname__, "options": options}

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        main = {key: data[key] for key in _MAIN if data.get(key) not in (None, _FILE)}
        if main:
            os.environ[CHILD] = json.dumps({**told, **main})
            data = {key: value for key, value in data.items() if key not in _MAIN} | {"init_main_from_path": _FILE}
        return data

    multiprocessing.spawn.get_preparation_data = prepared


def _be_child(told: dict[str, Any], names: dict[str, Any]) -> None:
    """Python runs this file in place of the script: become what the parent is, then be the script."""
    getattr(import_module(told["module"]), told["function"])(**told["options"])
    if _MODULE in told:
        names.update(runpy.run_module(told[_MODULE], run_name="__mp_main__", alter_sys=True))
        return
    script = told[_SCRIPT]
    names["__file__"] = script
    with open(script, "rb") as file:  # noqa: PTH123  # before the program may have changed anything
        exec(compile(file.read(), script, "exec"), names)


if __name__ == "__mp_main__" and CHILD in os.environ:
    _be_child(json.loads(os.environ[CHILD]), globals())
