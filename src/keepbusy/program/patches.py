"""Functions of PyTorch's that are replaced while a program is recorded, and put back afterwards.

Nothing is imported for it: what the program sets before its imports (threads, devices, logs) keeps its meaning. What is
not there yet is replaced right after the program has imported it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

Function = Callable[..., Any]


class Patches:
    """What was replaced, in order. What somebody else has replaced since then is left to him."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, made: Callable[[Function], Function]) -> None:
        """`made` is given the original, and gives what stands in its place. What is not there needs nothing."""
        original, own = getattr(owner, name, None), vars(owner).get(name)
        if original is None:
            return
        is_inherited = own is None and isinstance(owner, type) and isinstance(original, FunctionType)
        plain = _inherited(owner, name) if is_inherited else original
        ours: Function = functools.wraps(original)(made(plain))
        if isinstance(original, _BuiltIn) or not hasattr(type(original), "__get__"):
            ours = _BuiltIn(ours)
        setattr(owner, name, ours)

        def put_back() -> None:
            if vars(owner).get(name) is ours and own is None:
                delattr(owner, name)
            elif vars(owner).get(name) is ours:
                setattr(owner, name, own)

        self.later(put_back)

    def wrap(self, owner: Any, name: str, around: Function) -> None:
        """`around` is called instead, with the original before what that would be given."""
        self.replace(owner, name, lambda original: lambda *args, **kwargs: around(original, *args, **kwargs))

    def later(self, undo: Callable[[], object]) -> None:
        """Something else that is to be undone with the rest."""
        self._undo.append(undo)

    def undo(self) -> None:
        """The last one first. To do it twice does nothing."""
        while self._undo:
            self._undo.pop()()


class _BuiltIn(staticmethod):  # type: ignore[type-arg]
    """As a built-in function it is no method where a class has it, and is pickled by its name."""

    def __reduce__(self) -> str:
        return self.__name__


def _inherited(owner: type, name: str) -> Function:
    """Found anew at each call, for others may replace it meanwhile, as `torch.fx` does while it traces."""

    def inherited(one: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, one), name)(*args, **kwargs)

    return inherited


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


# What PyTorch's compiler and TorchScript make of what is replaced.


def left_alone(function: Function) -> Function:
    """What PyTorch's compiler is not to look into, wherever it meets it: neither it nor what it calls is compiled.

    `torch.compiler.disable` would import the compiler.
    """
    from keepbusy.torch_names.hooks import DISABLED, REASON, never_compile

    setattr(function, DISABLED, True)
    setattr(function, REASON, None)
    return never_compile(function, "SKIP")


def called_plainly(function: Function) -> Function:
    """What is called where a compiled function goes on as Python: what it calls is compiled as if called without it."""
    from keepbusy.torch_names.hooks import never_compile

    return never_compile(function, "DEFAULT")


def admit_lazy_parameters(patches: Patches) -> None:
    """Parameters without a shape know the methods that they may be asked for by identity, so they are told the new."""
    from torch import Tensor

    from keepbusy.torch_names.hooks import LAZY_METHODS

    known = getattr(*LAZY_METHODS)
    setattr(*LAZY_METHODS, known + [getattr(Tensor, method.__name__, method) for method in known])
    patches.later(lambda: setattr(*LAZY_METHODS, known))


def admit_scripts(patches: Patches) -> None:
    """TorchScript knows PyTorch's functions by identity, and is to know what stands in their place."""
    from keepbusy.torch_names.hooks import FIND_FOR_SCRIPT, make_script_table

    make_script_table()  # made of PyTorch's own, before they are replaced

    def find(plain: Function, function: Any) -> Any:
        found = plain(function)
        while found is None and (function := getattr(function, "__wrapped__", None)) is not None:
            found = plain(function)
        return found

    patches.wrap(*FIND_FOR_SCRIPT, find)
