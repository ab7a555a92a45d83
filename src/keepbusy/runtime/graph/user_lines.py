"""Lines of the user's own program, as messages name them: `train.py:31 (loss.item())`."""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from keepbusy.torch_names.pytorch import tree_leaves

OURS = str(Path(__file__).parents[2])
TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_GENERATED = ("<frozen", "<eval")
_SHOWN = 80
"""Letters of a line."""


@cache
def is_users(file: str) -> bool:
    """Whether a file is the user's: not PyTorch's, not ours, not an installed library's."""
    return not file.startswith((OURS, TORCH, *_LIBRARIES, *_GENERATED))


def line_of(error: BaseException) -> str:
    """Where the user's program was when the error came, or the library that it had called."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [place for place in places if is_users(place[0])]
    known = own or [place for place in places if not place[0].startswith((OURS, TORCH))]
    return line_text(*known[-1]) if known else ""


def depth_of_user() -> int:
    """For a warning: how many frames up the user's program called us."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    return depth


def line_text(file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    place = f"{Path(file).name}:{line}"
    shown = source if len(source) <= _SHOWN else f"{source[: _SHOWN - 1]}…"
    return f"{place} ({shown})" if source else place


def code_of(step: Any) -> CodeType | None:
    """Of a function, a method, or what stands for one."""
    function = inspect.unwrap(getattr(step, "__func__", step))
    return function.__code__ if isinstance(function, FunctionType) else None


def line_within(frame: FrameType | None, code: CodeType | None) -> int:
    """The line at which the function of this code is, that this frame was called from; 0 if it was not."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


class LineTracer:
    """Runs a step and finds the line after which `probe` says something else than before. Slow: for one call."""

    def __init__(self, probe: Callable[[], Any], code: CodeType | None) -> None:
        """`code`: the step's own."""
        self.found, self.line_of_step = "", 0
        self._probe, self._code = probe, code
        self._last: tuple[str, int, int] | None = None

    def run(self, step: Callable[[], Any]) -> Any:
        self._before = self._probe()
        outer = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return step()
        finally:
            sys.settrace(outer)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        is_named_tuple = str(frame.f_globals.get("__name__", "")).startswith("namedtuple_")  # whose code Python makes
        return self._line if is_users(frame.f_code.co_filename) and not is_named_tuple else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if self._last and not self.found and self._probe() != self._before:
            file, line, self.line_of_step = self._last
            self.found = line_text(file, line)
        if event == "line":
            self._last = (frame.f_code.co_filename, frame.f_lineno, line_within(frame, self._code))
        return self._line


_READS = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__"),
    *("nonzero", "is_nonzero", "equal", "allclose", "masked_select", "unique", "bincount", "repeat_interleave"),
}
"""Functions for which the host waits."""
_COPIES = {"to", "cuda", "copy_", "type", "new_tensor", "tensor", "as_tensor"}
_OF_A_BACKWARD_PASS = 8
"""At least so many kernels."""


class LaunchedLines(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """For one call of a function: how often each of its lines, its own or in what it calls, has the GPU do something,
    and at which lines the host waits, or copies what is no constant. PyTorch does what it does without it."""

    def __init__(self, code: CodeType) -> None:
        super().__init__()
        self.launching: Counter[int] = Counter()
        self.staying: set[int] = set()
        self._code, self._constants = code, dict[int, Tensor]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        held = [tensor for tensor in given if not tensor.is_cuda]
        are_constants = all(id(tensor) in self._constants for tensor in held)
        if not any(tensor.is_cuda for tensor in (*given, *made)):
            if are_constants and name not in _READS and "rand" not in name and "numpy" not in name:
                self._constants |= {id(tensor): tensor for tensor in made}
            return result
        if name in ("__get__", "__set__", "__delete__"):  # of an attribute
            return result
        line = line_within(sys._getframe(1), self._code)
        copies = name in _COPIES and any(not tensor.is_cuda for tensor in (*given, *made))
        is_mask = "item__" in name and any(tensor.dtype is torch.bool for tensor in given[1:])
        if name in _READS or is_mask or (copies and not (held and are_constants)):
            self.staying.add(line)
        if name == "backward":
            self.launching[line] += _OF_A_BACKWARD_PASS
        elif not (copies or name in _READS):
            self.launching[line] += 1
        return result
