"""What the bytecode of a function reads: names, and the attributes and constant places behind them.

    self.config.sizes[0]        Read("self", ((".", "config"), (".", "sizes"), ("[]", 0)))

Where it writes to the host, or reads what nobody can follow from here, `findings` say so, as the end of a sentence.
Each stands with its line, for what is on a line that did not run does not count.
"""

from __future__ import annotations

import dis
from collections import Counter
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch

from keepbusy.runtime.graph.user_lines import line_text

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

    def _other(self, one: dis.Instruction) -> None:
        if one.opname in _OUTER_NAMES and one.argval == "getattr":
            self._waits_for = "object"
            return
        if self._waits_for == "object" and one.opname not in ("PUSH_NULL", "EXTENDED_ARG"):
            self._waits_for = "name"
            if one.opname not in _NAMES:
                self.end_path()
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
