"""Functions of PyTorch's that are replaced while a program is recorded, and put back afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def left_alone(function: Function) -> Function:
    """What PyTorch's compiler is not to look into, wherever it meets it: it is called as it stands.

    `torch.compiler.disable` would import the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    run_plainly(function)
    return function


def run_plainly(function: Any) -> None:
    """What is called where a compiled function goes on as Python is not compiled, nor is what it calls."""
    from torch._C._dynamo import eval_frame

    skipped = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skipped, skipped)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


class Patches:
    """What was replaced, in order. What somebody else has replaced since then is left to him."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, made: Callable[[Function], Function]) -> None:
        """`made` is given the original, and gives what stands in its place. What is not there needs nothing."""
        original, own = getattr(owner, name, None), vars(owner).get(name)
        if original is None:
            return
        ours = functools.wraps(original)(made(original))
        setattr(owner, name, ours)
        self.later(lambda: _put_back(owner, name, ours, own))

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


def admit_lazy_parameters(patches: Patches) -> None:
    """Parameters without a shape know the methods that they may be asked for by identity, so they are told the new."""
    from torch import Tensor
    from torch.nn import parameter

    lazy: Any = vars(parameter)["UninitializedTensorMixin"]
    known = lazy._allowed_methods
    lazy._allowed_methods = known + [getattr(Tensor, one.__name__, one) for one in known]
    patches.later(lambda: setattr(lazy, "_allowed_methods", known))


def _put_back(owner: Any, name: str, ours: Function, own: Any) -> None:
    if vars(owner).get(name) is not ours:
        return
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def admit_scripts(patches: Patches) -> None:
    """TorchScript knows PyTorch's functions by identity, and is to know what stands in their place."""
    from torch.jit import _builtins

    _builtins._get_builtin_table()  # made of PyTorch's own, before they are replaced
    patches.replace(
        _builtins, "_find_builtin", lambda plain: lambda one: plain(one) or plain(getattr(one, "__wrapped__", None))
    )
