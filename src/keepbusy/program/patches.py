"""Replaces functions of PyTorch while a program is recorded, and puts them back afterwards.

Nothing is imported for that, so what the program sets before its imports (threads, devices, logs) keeps its effect. A
module that is not imported yet is patched right after the program has imported it.
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
    """Replacements in order. What somebody else has replaced since then is left as it is."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, made: Callable[[Function], Function]) -> None:
        """Replace an attribute with what `made` makes of the original. A missing attribute is ignored."""
        original, own = getattr(owner, name, None), vars(owner).get(name)
        if original is None:
            return
        is_inherited = own is None and isinstance(owner, type) and isinstance(original, FunctionType)
        plain = _inherited(owner, name) if is_inherited else original
        replacement: Function = functools.wraps(original)(made(plain))
        if isinstance(original, _BuiltIn) or not hasattr(type(original), "__get__"):
            replacement = _BuiltIn(replacement)
        setattr(owner, name, replacement)

        def put_back() -> None:
            if vars(owner).get(name) is replacement and own is None:
                delattr(owner, name)
            elif vars(owner).get(name) is replacement:
                setattr(owner, name, own)

        self.later(put_back)

    def wrap(self, owner: Any, name: str, around: Function) -> None:
        """Replace a function with `around`, which gets the original as its first argument."""
        self.replace(owner, name, lambda original: lambda *args, **kwargs: around(original, *args, **kwargs))

    def later(self, undo: Callable[[], object]) -> None:
        """Add something else to undo."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo everything, the last first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


class _BuiltIn(staticmethod):  # type: ignore[type-arg]
    """Like a built-in function, it is no method when a class has it, and is pickled by its name."""

    def __reduce__(self) -> str:
        return self.__name__


def _inherited(owner: type, name: str) -> Function:
    """Look the function up at each call, because others may replace it, as `torch.fx` does while it traces."""

    def inherited(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, instance), name)(*args, **kwargs)

    return inherited


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` right after the program has imported the module, or at once if it is imported already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Expected(name, then))


class _Expected:
    """An import finder that comes first and answers for one module only, until that is executed.

    Being asked does not mean that the module is imported: `find_spec("torch")` only checks that it is installed.
    """

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then
        self._asking = set[int]()
        """Threads that are asking the other finders."""

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
        """Call `then` after this loader, which belongs to the module alone, has executed it."""
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # if several follow it, the first has removed it
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            self._then()

        loader.exec_module = exec_module  # type: ignore[attr-defined]


# How PyTorch's compiler and TorchScript treat replaced functions


def left_alone(function: Function) -> Function:
    """Keep PyTorch's compiler from compiling the function and what it calls.

    `torch.compiler.disable` would import the compiler.
    """
    from keepbusy.torch_names.hooks import DISABLED, REASON, never_compile

    setattr(function, DISABLED, True)
    setattr(function, REASON, None)
    return never_compile(function, "SKIP")


def called_plainly(function: Function) -> Function:
    """Keep PyTorch's compiler from compiling the function, but let it compile what the function calls."""
    from keepbusy.torch_names.hooks import never_compile

    return never_compile(function, "DEFAULT")


def admit_lazy_parameters(patches: Patches) -> None:
    """Let lazy parameters accept replaced methods, because they check allowed methods by identity."""
    from torch import Tensor

    from keepbusy.torch_names.hooks import LAZY_METHODS

    allowed = getattr(*LAZY_METHODS)
    setattr(*LAZY_METHODS, allowed + [getattr(Tensor, method.__name__, method) for method in allowed])
    patches.later(lambda: setattr(*LAZY_METHODS, allowed))


def admit_scripts(patches: Patches) -> None:
    """Let TorchScript recognize replaced functions, because it knows PyTorch's functions by identity."""
    from keepbusy.torch_names.hooks import FIND_FOR_SCRIPT, make_script_table

    make_script_table()  # built from PyTorch's own functions, before they are replaced

    def find(original: Function, function: Any) -> Any:
        name = original(function)
        while name is None and (function := getattr(function, "__wrapped__", None)) is not None:
            name = original(function)
        return name

    patches.wrap(*FIND_FOR_SCRIPT, find)
