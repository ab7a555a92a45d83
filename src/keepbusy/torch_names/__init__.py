"""Every private or version-dependent name of PyTorch and CPython that keepbusy uses: where it is, whether this version
has it as it is needed, and what is lost without it.

A name is looked up and registered in one statement, and the other rooms import the result. So what the next release
renames is mended here, after `keepbusy doctor` has said what that is. What a version lacks raises once it is used, not
at import.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, NoReturn

_FILES = ("cpython", "pytorch", "dispatcher", "hooks", "distributed", "headers")


class MissingName(AttributeError):  # noqa: N818  # what is wrong, not that something is
    """This version has no such name."""


class Probe(NamedTuple):
    """One name. `check` raises MissingName where it is missing; what it returns is true where it is as needed."""

    name: str
    lost: str
    """What keepbusy cannot do without it, as part of a sentence."""
    check: Callable[[], object]

    def finding(self) -> str:
        """What is wrong with it here, or an empty string."""
        try:
            wrong = "" if self.check() else "is not as expected"
        except MissingName:
            wrong = "is missing"
        except Exception:  # whatever another form of it raises
            wrong = "is not as expected"
        return f"{self.name} {wrong}, so {self.lost}" if wrong else ""


PROBES: list[Probe] = []


def _found(path: str) -> Any:
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        raise MissingName(path) from None


def _exists(_found: Any) -> bool:
    return True


# How a name is registered. A `path` is `module:attribute`. `lost` and `holds` are of its probe. `holds` is given what
# was found.


def register(path: str, lost: str, holds: Callable[[Any], object] = _exists, since: tuple[int, ...] = ()) -> None:
    """Of what is imported in the ordinary way, as classes are that types need, or used where it stands. `since`: the
    version of PyTorch that brought it; earlier ones need none."""
    if since and tuple(map(int, re.findall(r"\d+", resolve_name("torch:__version__"))[:2])) < since:
        return
    PROBES.append(Probe(path.replace(":", "."), lost, lambda: holds(_found(path))))


def look_up(path: str, lost: str, holds: Callable[[Any], object] = callable) -> Any:
    """What stands there now: the object itself, so that using it costs nothing more."""
    register(path, lost, holds)
    try:
        return _found(path)
    except MissingName:
        return _Missing(path)


def later(
    path: str, lost: str, holds: Callable[[Any], object] = callable, since: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Calls what stands there then: of a module that not every program imports, or replaced by the virtual GPU."""
    register(path, lost, holds, since)

    def call(*args: Any, **kwargs: Any) -> Any:
        return resolve_name(path)(*args, **kwargs)

    return call


def cuda_only(path: str, lost: str) -> Any:
    """What a build without CUDA need not have; None where it is missing."""
    if resolve_name("torch:version.cuda") is not None:
        register(path, lost, callable)
    try:
        return _found(path)
    except MissingName:
        return None


def place(path: str, lost: str, holds: Callable[[Any], object] = callable) -> tuple[Any, str]:
    """The owner of a name and the name: for `Patches.replace`, `getattr` and `setattr`."""
    register(path, lost, holds)
    owner, _, name = path.rpartition("." if "." in path.partition(":")[2] else ":")
    try:
        return _found(owner), name
    except MissingName:
        return _Missing(owner), name


def attribute(kind: str, name: str, lost: str) -> str:
    """The name of an attribute that objects of this class have."""

    def check() -> bool:
        if not has_attribute(_found(kind), name):
            raise MissingName(name)
        return True

    PROBES.append(Probe(f"{kind}.{name}".replace(":", "."), lost, check))
    return name


def reader(kind: str, name: str, lost: str) -> Callable[[Any], Any]:
    """What reads such an attribute."""
    return attrgetter(attribute(kind, name, lost))


def in_source(module: str, name: str, lost: str) -> str:
    """A name in a module that takes long to import: its source is read instead."""

    def check() -> bool:
        file = Path(_found("torch:__file__")).parents[1] / f"{module.replace('.', '/')}.py"
        if not file.exists() or not re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")):
            raise MissingName(name)
        return True

    PROBES.append(Probe(f"{module}.{name}", lost, check))
    return name


def has_attribute(kind: type, name: str) -> bool:
    """Whether the class has an attribute of that name, or code of its methods gives its objects one."""
    functions = (function for base in kind.__mro__ for function in vars(base).values() if callable(function))
    codes = (getattr(inspect.unwrap(function), "__code__", None) for function in functions)
    return hasattr(kind, name) or any(code and name in (*code.co_names, *code.co_consts) for code in codes)


def takes(*given: Any, **options: Any) -> Callable[[Any], bool]:
    """Whether a function can be called so."""
    return lambda function: bool(inspect.signature(function).bind(*given, **options))


class _Missing:
    """Stands for what this version lacks."""

    def __init__(self, path: str) -> None:
        self._name = path.replace(":", ".")

    def __call__(self, *_args: Any, **_options: Any) -> NoReturn:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        raise MissingName(f"PyTorch {version} has no {self._name}, which keepbusy needs: run keepbusy doctor")


def probe_all() -> tuple[int, list[str]]:
    """How many names were looked up, and in a sentence each what is missing or different."""
    findings = []
    for file in _FILES:
        try:
            import_module(f"{__name__}.{file}")
        except (ImportError, AttributeError) as error:
            findings.append(f"{error}, so what needs {file}.py of {__name__} does not run")
    return len(PROBES), findings + [finding for probe in PROBES if (finding := probe.finding())]
