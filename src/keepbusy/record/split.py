"""Where one event of a JSON text ends and the next begins.

Usually a cheap guess is right, and decoding tells when it is not: a cut at the wrong depth leaves
brackets open. Then the text is scanned exactly, with numpy, whatever its layout.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import NONE, Ints, Mask

_BOUNDARY = re.compile(rb"\}[ \t\r\n]*(,)[ \t\r\n]*\{")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_TRACE_EVENTS = re.compile(rb'"traceEvents"[ \t\r\n]*:[ \t\r\n]*([^ \t\r\n])')
_END, _BETWEEN, _LAST = b"\n  }", b"\n  },\n  {", b"\n  }\n  ]"
"""Kineto's layout; its strings hold no line breaks."""
_WINDOWS = (8 << 10, 256 << 10)
_BOM = b"\xef\xbb\xbf"

_DEPTH = np.zeros(256, np.int64)
_DEPTH[list(b"{[")] = 1
_DEPTH[list(b"}]")] = -1
_TELLING = np.zeros(256, np.bool_)
_TELLING[list(b'{}[]"\n')] = True


class Piece(NamedTuple):
    """The whole events of a text that begins within a list: from where to where, and where the list is closed."""

    events: list[tuple[int, int]]
    closing: int

    @property
    def until(self) -> int:
        """Up to where the text is understood."""
        if self.closing != NONE:
            return self.closing
        return self.events[-1][1] if self.events else 0


def last_boundary(text: bytes) -> int:
    """A comma that probably parts two events, as late as possible; NONE if there is none."""
    for window in _WINDOWS:
        begin = max(0, len(text) - window)
        found = [match.start(1) for match in _BOUNDARY.finditer(text, begin)]
        if found:
            return found[-1]
    return NONE


def scan(text: bytes) -> Piece:
    """The events between here and the end of the list, found exactly."""
    places, characters, depth = _brackets(text)
    closed = np.flatnonzero(depth < 0)
    last = int(closed[0]) if len(closed) else len(places)
    starts = places[:last][(characters[:last] == ord("{")) & (depth[:last] == 1)]
    ends = places[:last][(characters[:last] == ord("}")) & (depth[:last] == 0)] + 1
    events = list(zip(starts.tolist(), ends.tolist(), strict=False))
    return Piece(events, int(places[last]) if len(closed) else NONE)


def scan_layout(text: bytes) -> Piece:
    """The events as Kineto lays them out, whatever stands in them; none if the layout is another."""
    closing = text.find(_LAST)
    upto = text.rfind(_BETWEEN) if closing == NONE else closing
    begin = text.find(b"{")
    if upto < begin or begin == NONE:
        return Piece([], NONE)
    events = []
    for inner in text[begin + 1 : upto].split(_BETWEEN):
        events.append((begin, begin + 1 + len(inner) + len(_END)))
        begin += len(inner) + len(_BETWEEN)
    return Piece(events, NONE if closing == NONE else closing + len(_LAST) - 1)


def _brackets(text: bytes) -> tuple[Ints, npt.NDArray[Any], Ints]:
    """Of each bracket outside strings: where it stands, which it is, and the depth after it."""
    if b"\\" in text:
        text = _ESCAPE.sub(b"  ", text)
    content = np.frombuffer(text, np.uint8)
    places = np.flatnonzero(_TELLING[content])
    characters = content[places]
    outside = ~_within_string(characters)
    step = np.where(outside, _DEPTH[characters], 0)
    kept = step != 0
    return places[kept], characters[kept], np.cumsum(step[kept])


def _within_string(characters: npt.NDArray[Any]) -> Mask:
    """JSON allows no line break in a string, so each line starts afresh: a stray quote harms one line only."""
    quotes = np.cumsum(characters == ord('"'))
    before = np.maximum.accumulate(np.where(characters == ord("\n"), quotes, 0))
    return ((quotes - before) & 1).astype(np.bool_)


def opening(path: str, text: bytes) -> int:
    """Where the list of events opens, just past its bracket; NONE if that is still to come."""
    if text.startswith(b"["):
        return 1
    if not text.startswith(b"{"):
        if text:
            raise BadInput(f"{path} is not JSON: it begins with {text[:16]!r}; give a PyTorch profiler trace.")
        return NONE
    for match in _TRACE_EVENTS.finditer(text):
        if _is_key(text[: match.start()]):
            if match[1] != b"[":
                raise BadInput(f"{path} has a `traceEvents` that is no list; give a PyTorch profiler trace.")
            return match.end()
    return NONE


def begin_of(text: bytes) -> int:
    """Past a byte order mark and blanks."""
    mark = len(_BOM) if text.startswith(_BOM) else 0
    return len(text) - len(text[mark:].lstrip())


def _is_key(before: bytes) -> bool:
    """Whether what follows is a key of the outermost object."""
    depth = _brackets(before)[2]
    return len(depth) > 0 and int(depth[-1]) == 1
