"""What a call reads on the host, whatever it reaches it through: a number of a module, of an object, of another file.

A graph keeps such numbers as they were when it was captured. So the call is watched while it runs twice as written. The
bytecode of the lines that ran, outside of PyTorch and Python's own library, says which names and attributes are read,
and what they stand for can be compared before each replay: while that is the same, the same lines run. Where the
bytecode does not say it, or where the call does something on the host that a replay would not do, `finding` tells, as
the end of a sentence.
"""

from __future__ import annotations

import builtins
import dis
import sys
import sysconfig
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from keepbusy.instrument.lines import TEXTS
from keepbusy.runtime.graph.module_state import ModuleState
from keepbusy.runtime.graph.names_read import PLAIN
from keepbusy.runtime.graph.user_lines import OURS, TORCH, line_text
from keepbusy.runtime.module_parts import submodules

_PYTHON = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_NUMPY = tuple(f"{folder}/numpy/" for folder in _INSTALLED)
_GENERATED = ("<frozen", "<string", "<eval")
_OUTSIDE, _OF_TORCH, _OF_PYTHON, _OF_PROGRAM = range(4)
_NOT_REPLAYED = {
    "utils/checkpoint.py": "computes activations again in its backward pass",
    "distributed/": "talks to other ranks",
    "random.py": "sets random numbers",
    "cuda/random.py": "sets random numbers",
}
"""Of PyTorch's files: what passes through them is not what a replay does, or not ours to look into."""
_COMPILED = ("_TorchDynamoContext", "OptimizedModule")
_PYTHON_FILES = {
    "contextlib.py",
    "functools.py",
    "typing.py",
    "enum.py",
    "abc.py",
    "_collections_abc.py",
    "operator.py",
    "dataclasses.py",
}
_PYTHON_FUNCTIONS = {("inspect.py", "signature"), ("inspect.py", "parameters")}
_BUILTINS = {
    *("len", "isinstance", "issubclass", "zip", "enumerate", "reversed", "sorted", "sum", "min", "max", "abs", "round"),
    *("any", "all", "hasattr", "getattr", "callable", "divmod", "pow", "repr", "__build_class__"),
}
_C_MODULES = {"math", "cmath", "itertools", "_functools", "functools", "_operator", "_collections", "_abc", "typing"}
"""Files and functions of Python's own that only make something of what they are given."""
_FIXED = torch.device | torch.dtype | torch.Size | torch.layout | torch.memory_format
"""Made of tensors, and never changed."""
_CONTAINERS = (tuple, list, dict, set, frozenset, OrderedDict, deque)
_PARTS = ("_modules", "_parameters", "_buffers")
_SETTINGS = (
    torch.get_default_dtype,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
)
"""Of the process, which choose kernels."""
_DEEPEST, _LARGEST = 3, 256
"""Of containers whose content is compared."""
_STATEFUL = {"numpy", "random", "time", "os", "sys"}
_HEAP_TYPE = 1 << 9
"""Of classes that are written in Python."""


@cache
def _kind_of(file: str) -> int:
    if file.startswith((OURS, *_GENERATED)) and file not in TEXTS:
        return _OUTSIDE
    if file.startswith(TORCH):
        return _OF_TORCH
    if file.startswith(_INSTALLED):
        return _OF_PYTHON if file.startswith(_NUMPY) else _OF_PROGRAM
    return _OF_PYTHON if file.startswith(_PYTHON) else _OF_PROGRAM


class HostReads:
    """Watches a call twice. From then on `now()` is all that decides on the host what the call does."""

    def __init__(self) -> None:
        self.finding = ""
        self._found: dict[tuple[int, Steps], Any] = {}
        self._codes: set[CodeType] = set()
        self._around: list[tuple[CodeType, str]] = []
        self._modules: dict[nn.Module, None] = {}
        self._lines: dict[CodeType, set[int]] = {}
        """Those that ran, of the program's functions."""
        self._looked = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the call runs as it is written."""
        before, self._found = self._found, {}
        is_free = sys.getprofile() is None and sys.gettrace() is None
        if is_free:
            sys.settrace(self._on_line)
            sys.setprofile(self._on_event)
        else:
            self.finding = "somebody profiles it"
        try:
            yield
        finally:
            if is_free:
                sys.setprofile(None)
                sys.settrace(None)
        if self._looked:  # what was made for one call alone is another object the next time
            self._found = {key: root for key, root in self._found.items() if key in before}
            self._settle()
        self._looked = True

    def now(self) -> tuple[Any, ...]:
        """What it reads, as a value that can be compared."""
        try:
            return (
                *self._of_modules.numbers(),
                *self._of_modules.places(),
                *self._of_modules.code(),
                *[ask() for ask in _SETTINGS],
                *[_content(_reached(root, path)) for root, path in self._others],
            )
        except KeyError:  # an attribute is gone
            return ()

    def modules(self) -> list[nn.Module]:
        """All that takes part."""
        return submodules(self._modules)

    def _settle(self) -> None:
        self._refuse_numbers_around()
        self._of_modules = ModuleState(self.modules())
        self.finding = self.finding or self._of_modules.finding()
        self._others = [(root, path) for (_, path), root in self._found.items() if not _is_part(root, path)]
        self._kept = [_reached(root, path) for root, path in self._others]  # so that nothing new gets its identity
        self._found.clear()

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.finding:
            try:
                self._follow(frame, event, argument)
            except Exception as error:  # of what an attribute of the program's does; it is not the program that asked
                self.finding = f"looking into it failed with «{error}»"

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._on_line if _kind_of(frame.f_code.co_filename) == _OF_PROGRAM else None

    def _follow(self, frame: FrameType, event: str, argument: Any) -> None:
        kind = _kind_of(frame.f_code.co_filename)
        if event == "return" and kind == _OF_PROGRAM:
            self._look(frame)
        elif event == "c_call" and kind == _OF_PROGRAM and not _is_harmless(argument):
            self.finding = f"it calls {getattr(argument, '__name__', argument)}, {_place(frame)}"
        elif event == "call" and kind == _OF_TORCH:
            self._enter_torch(frame)
        elif event == "call" and kind == _OF_PYTHON:
            self._enter_python(frame)

    def _enter_torch(self, frame: FrameType) -> None:
        file, name = frame.f_code.co_filename[len(TORCH) + 1 :], frame.f_code.co_name
        if file == "nn/modules/module.py" and name == "_call_impl":
            self._modules.setdefault(frame.f_locals["self"])
        elif file == "_tensor.py" and name == "register_hook":
            self.finding = "it has hooks in its backward pass"
        elif file == "autograd/function.py" and name == "apply" and not _is_ours(frame.f_back):
            self.finding = "it has a backward pass of its own in Python"
        elif file.startswith("_dynamo/") and frame.f_code.co_qualname.startswith(_COMPILED):
            self.finding = "it is compiled"
        else:
            found = (
                why
                for part, why in _NOT_REPLAYED.items()
                if file == part or (part[-1] == "/" and file.startswith(part))
            )
            self.finding = f"it {why}" if (why := next(found, "")) else ""

    def _enter_python(self, frame: FrameType) -> None:
        file, outer = Path(frame.f_code.co_filename), frame.f_back
        if outer is None or _kind_of(outer.f_code.co_filename) != _OF_PROGRAM:
            return
        is_known = file.name in _PYTHON_FILES or (file.name, frame.f_code.co_name) in _PYTHON_FUNCTIONS
        if not is_known and file.parent.name != "collections":
            self.finding = f"it calls {frame.f_code.co_name}, {_place(outer)}"

    def _look(self, frame: FrameType) -> None:
        """A function of the program returns: what its names stand for."""
        code, own = frame.f_code, frame.f_locals
        self._codes.add(code)
        reads, changing, findings = reads_of(code)
        ran = self._lines.get(code, set())
        self.finding = next((why for why, line in findings if line in ran), "")
        for name, path, line in reads:
            if self.finding:
                return
            if line not in ran or name.startswith("."):  # what a comprehension goes through stands outside of it
                continue
            if name in own and not self._is_made_here(code, name, own[name], changing):
                self._note(own[name], path)
            elif name in code.co_varnames:
                if name not in own and path and path[0][1] not in KNOWN_ATTRIBUTES:
                    self.finding = f"it reads .{path[0][1]} of {name} in {code.co_name}"
            elif name in frame.f_globals:
                self._note(frame.f_globals, (("[]", name), *path))

    def _is_made_here(self, code: CodeType, name: str, value: Any, changing: frozenset[str]) -> bool:
        """Numbers and tensors come from what else is read; what else changes while the function runs is not known."""
        if type(value) in PLAIN and name in code.co_freevars:
            self._around.append((code, name))
        if type(value) in PLAIN or isinstance(value, Tensor | nn.Module | type | _FIXED):
            if isinstance(value, nn.Module):
                self._modules.setdefault(value)
                return name in changing
            return True
        if name in changing and not isinstance(value, _CONTAINERS):
            self.finding = f"it reads several {type(value).__name__} by the name {name} in {code.co_name}"
        return name in changing

    def _note(self, held: Any, path: Steps) -> None:
        """What lies along the way, up to a function or what belongs to a tensor."""
        root = held
        for at, (how, name) in enumerate(path):
            if (callable(held) and not isinstance(held, nn.Module | type)) or isinstance(held, Tensor):
                path = path[:at]
                break
            self._meet(held)
            try:
                held = _step(held, how, name)
            except (AttributeError, KeyError, IndexError, TypeError):
                path = path[: at + 1]  # which may be there some day
                break
        self._meet(held)
        if isinstance(held, MethodType) or not isinstance(getattr(held, "__self__", None), ModuleType | type | None):
            path = path[:-1]  # a method: it is its owner that may change
        if not isinstance(held, ModuleType):
            self._found[id(root), path] = root

    def _meet(self, held: Any) -> None:
        """Something on the way: a module takes part; what is written in C may count for itself."""
        if isinstance(held, nn.Module):
            self._modules.setdefault(held)
        else:
            self.finding = self.finding or _unknown(held)

    def _refuse_numbers_around(self) -> None:
        """A number of the function around one that ran cannot be asked for, unless that ran here, too."""
        inner = {one for code in self._codes for one in code.co_consts if isinstance(one, CodeType)}
        for code, name in self._around:
            if code not in inner:
                self.finding = self.finding or f"it reads {name} of the function around {code.co_name}"


def _step(held: Any, how: str, name: Any) -> Any:
    return getattr(held, name) if how == "." else held[name]


def _reached(held: Any, path: Steps) -> Any:
    try:
        for how, name in path:
            held = _step(held, how, name)
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
    return held


def _is_part(held: Any, path: Steps) -> bool:
    """Whether it is a module's own number or part: those are asked for all at once."""
    for at, (_, name) in enumerate(path):
        if not isinstance(held, nn.Module):
            return False
        own = vars(held)
        if type(own.get(name, own)) in PLAIN:
            return at == len(path) - 1
        holding = next((own[one] for one in _PARTS if name in own[one]), None)
        if holding is None:
            return False
        held = holding[name]
    return isinstance(held, nn.Module | Tensor)


def _content(value: Any, depth: int = _DEEPEST) -> Any:
    """Numbers and texts themselves, tensors by where they lie, containers by what is in them, others by identity."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return (value.data_ptr(), value._version) if value.device.type == "cpu" else value.data_ptr()
    if type(value) in _CONTAINERS and depth:
        parts = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        return (len(value), *[_content(one, depth - 1) for one in parts])
    return id(value)


def _unknown(held: Any) -> str:
    """Why numbers may come from it that nobody can ask for from here; nothing if that is not so."""
    kind = type(held)
    package = kind.__module__.partition(".")[0]
    if isinstance(held, ModuleType):
        return f"it uses {held.__name__}" if held.__name__.partition(".")[0] in _STATEFUL else ""
    if isinstance(held, _CONTAINERS):
        is_file = isinstance(held, dict) and "__builtins__" in held  # whose names are asked for one by one
        return f"it reads a {kind.__name__} of {len(held)} things" if len(held) > _LARGEST and not is_file else ""
    if kind in PLAIN or callable(held) or package in ("torch", "types"):
        return ""
    is_of_python = kind.__flags__ & _HEAP_TYPE and not hasattr(kind, "__next__") and package != "numpy"
    return "" if is_of_python else f"it reads a {kind.__name__}"


def _is_harmless(called: Any) -> bool:
    """Whether a function of C is PyTorch's, or only makes something of what it is given."""
    owner = getattr(called, "__self__", None)
    kind = getattr(called, "__objclass__", None) or (owner if isinstance(owner, type) else type(owner))
    module = getattr(called, "__module__", None) or (owner.__name__ if isinstance(owner, ModuleType) else "")
    if owner is builtins:
        return called.__name__ in _BUILTINS
    if "torch" in (module.partition(".")[0], kind.__module__.partition(".")[0]):
        return True
    return module in _C_MODULES or kind in (str, bytes, int, float, *_CONTAINERS) or kind.__name__.startswith("dict_")


def _is_ours(frame: FrameType | None) -> bool:
    """A virtual GPU's operators."""
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def _place(frame: FrameType) -> str:
    return line_text(frame.f_code.co_filename, frame.f_lineno)


_REFUSED_NAMES = {
    *("vars", "globals", "locals", "eval", "exec", "setattr", "delattr", "open", "input", "print", "next"),
}
_WRITES = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"}
_OUTER_NAMES = {"LOAD_GLOBAL", "LOAD_NAME"}
_NAMES = {
    *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL", "LOAD_NAME"),
}
_PAIRS = {"LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"}
_KINDS_MADE = (torch.Tensor, torch.nn.Module, torch.Size, str, list, dict, tuple, set)
KNOWN_ATTRIBUTES = {name for kind in _KINDS_MADE for name in dir(kind)}
"""Of what is made on the way. Behind others there may be numbers that nobody sees from here."""
Steps: TypeAlias = tuple[tuple[str, Any], ...]
"""`.config.sizes[0]` as steps: an attribute, or what lies at a place."""


class Read(NamedTuple):
    """A name, and what is read behind it."""

    name: str
    path: Steps
    line: int


class Untraceable(NamedTuple):
    """Why nobody can follow what a line does."""

    why: str
    line: int


class CodeReads(NamedTuple):
    """What the bytecode of one function says."""

    reads: tuple[Read, ...]
    changing: frozenset[str]
    """Local names that stand for several things while it runs."""
    findings: tuple[Untraceable, ...]


@cache
def reads_of(code: CodeType) -> CodeReads:
    scan = _Bytecode(code)
    for one in dis.get_instructions(code):
        scan.follow(one)
    scan.end_path()
    return CodeReads(tuple(scan.reads), scan.changing(), tuple(scan.findings))


class _Bytecode:
    """Instructions one by one: a name, and the attributes and constant places that are read behind it at once."""

    def __init__(self, code: CodeType) -> None:
        self.reads: dict[Read, None] = {}
        self.findings: list[Untraceable] = []
        self._code, self._line = code, code.co_firstlineno
        self._name, self._path, self._constant = "", list[tuple[str, Any]](), None
        self._waits_for = ""
        """Of `getattr(object, "name")` what comes next."""
        self._stores = Counter(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        self._loops = False

    def changing(self) -> frozenset[str]:
        return frozenset(
            name for name, times in self._stores.items() if times > 1 or (self._loops and name not in self._given())
        )

    def _given(self) -> tuple[str, ...]:
        return self._code.co_varnames[: self._code.co_argcount + self._code.co_kwonlyargcount]

    def follow(self, one: dis.Instruction) -> None:
        name = one.opname
        if one.positions is not None and one.positions.lineno is not None:
            self._line = one.positions.lineno
        self._loops |= name.startswith("JUMP_BACKWARD")
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._attribute(one.argval)
        elif name == "LOAD_CONST" and self._waits_for == "name" and isinstance(one.argval, str):
            self._path.append((".", one.argval))
            self._waits_for = ""
        elif name == "LOAD_CONST" and self._name:
            self._constant = one.argval
            return
        elif self._name and isinstance(self._constant, str | int) and _is_subscript(one):
            self._path.append(("[]", self._constant))
        else:
            self.end_path()
            self._other(one)
        self._constant = None

    def end_path(self) -> None:
        if self._waits_for == "name":
            self._refuse("calls getattr with a name that is not written there")
            self._waits_for = ""
        if self._name:
            self.reads.setdefault(Read(self._name, tuple(self._path), self._line))
        self._name = ""
        self._path.clear()

    def _attribute(self, name: str) -> None:
        if self._name:
            self._path.append((".", name))
        elif name not in KNOWN_ATTRIBUTES:
            self._refuse(f"reads .{name} of what cannot be followed")

    def _begins_getattr(self, one: dis.Instruction) -> bool:
        if one.opname in _OUTER_NAMES and one.argval == "getattr":
            self._waits_for = "object"
            return True
        if self._waits_for == "object" and one.opname not in ("PUSH_NULL", "EXTENDED_ARG"):
            self._waits_for = "name"
            if one.opname not in _NAMES:
                self.end_path()
        return False

    def _other(self, one: dis.Instruction) -> None:
        if self._begins_getattr(one):
            return
        name, names = one.opname, one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if name in _NAMES:
            self._name = one.argval
        elif name in _PAIRS:
            self._name = names[1]
            if not name.startswith("STORE"):
                self.reads.setdefault(Read(names[0], (), self._line))
        if name.startswith("STORE_FAST"):
            self._stores.update(names[:1] if name in _PAIRS else names)
        if name in _WRITES or (name in ("STORE_DEREF", "DELETE_DEREF") and one.argval in self._code.co_freevars):
            self._refuse(f"writes {one.argval} on the host")
        if name in _OUTER_NAMES and self._name in _REFUSED_NAMES:
            self._refuse(f"calls {self._name}")

    def _refuse(self, what: str) -> None:
        self.findings.append(Untraceable(f"it {what}, {line_text(self._code.co_filename, self._line)}", self._line))


def _is_subscript(one: dis.Instruction) -> bool:
    return one.opname == "BINARY_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr == "[]")
