"""A trace's events, batch by batch, and what stands around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from keepbusy.record.decode import ERRORS, Decoder, Rows, is_json, repair
from keepbusy.record.split import Piece, begin_of, last_boundary, opening, scan, scan_layout
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import NONE

_MOST_BEFORE = 16 << 20
_MOST_AFTER = 64 << 20
_LONGEST_EVENT = 16 << 20
_LINE = re.compile(rb'^\s*"(\w+)": (.*?),?\s*$', re.MULTILINE)


class Batches:
    """Iterate over the events; then `facts` says what the file holds beside them."""

    def __init__(self, path: str, blocks: Iterator[bytes]) -> None:
        self.path = path
        self.decoder = Decoder()
        self._blocks = blocks
        self._before = b""
        self._after = b""
        self._closed = False

    def __iter__(self) -> Iterator[Rows]:
        text = self._open()
        for block in self._blocks:
            rows, text = self._whole_events(text + block)
            yield rows
            if self._closed:
                break
            self._refuse_endless(text)
        else:
            rows, text = self._whole_events_exactly(text, patience=0)
            yield rows
        if not self._closed:
            raise self._truncated()
        self._collect_after(text)

    def facts(self) -> dict[str, Any]:
        """Everything beside `traceEvents`."""
        if not self._before:  # the file is the list itself
            return {}
        whole = self._before + b"null" + self._after
        for attempt in (whole, repair(whole)):
            try:
                facts: dict[str, Any] = msgspec.json.decode(attempt)
                facts.pop("traceEvents", None)
                return facts
            except ERRORS:
                pass
        if not self._after.rstrip().endswith(b"}"):
            raise self._truncated()
        if not self._after.lstrip().startswith((b",", b"}")):
            raise self._damaged()
        return _facts_by_line(whole)

    def _open(self) -> bytes:
        text = b""
        for block in self._blocks:
            text = text + block if text else block[begin_of(block) :]
            start = opening(self.path, text)
            if start != NONE:
                self._before = text[: start - 1]
                return text[start:]
            if len(text) > _MOST_BEFORE:
                raise BadInput(
                    f"{self.path} has no `traceEvents` in its first {_MOST_BEFORE >> 20} MB; "
                    "give a PyTorch profiler trace."
                )
        raise self._without_events(text)

    def _whole_events(self, text: bytes) -> tuple[Rows, bytes]:
        cut = last_boundary(text)
        rows = None if cut == NONE else self._together(text, cut)
        return (rows, text[cut + 1 :]) if rows else self._whole_events_exactly(text)

    def _whole_events_exactly(self, text: bytes, patience: int = 1 << 20) -> tuple[Rows, bytes]:
        piece = scan(text)
        rows = self._together(text, piece.until)
        if rows is None or (piece.until == 0 and len(text) >= patience):
            piece = _despite_faults(text, piece)
            rows = self.decoder.one_by_one([text[start:end] for start, end in piece.events])
        self._closed = piece.closing != NONE
        if self._closed and text[piece.closing : piece.closing + 1] != b"]":
            raise self._damaged()
        return rows, text[piece.closing + 1 :] if self._closed else text[piece.until :].lstrip(b" \t\r\n,")

    def _together(self, text: bytes, until: int) -> Rows | None:
        try:
            return self.decoder.together(memoryview(text)[:until])
        except ERRORS:
            return None

    def _collect_after(self, text: bytes) -> None:
        parts, size = [text], len(text)
        for block in self._blocks:
            parts.append(block)
            size += len(block)
            if size > _MOST_AFTER:
                raise BadInput(
                    f"{self.path} has over {_MOST_AFTER >> 20} MB beside its `traceEvents`; "
                    "give a PyTorch profiler trace."
                )
        self._after = b"".join(parts)

    def _refuse_endless(self, text: bytes) -> None:
        if len(text) > _LONGEST_EVENT:
            raise BadInput(
                f"{self.path} has an event of more than {_LONGEST_EVENT >> 20} MB; give a PyTorch profiler trace."
            )

    def _truncated(self) -> BadInput:
        return BadInput(
            f"{self.path} ends in the middle of its JSON, so it was cut off while being written or copied; "
            "export or copy the trace again."
        )

    def _damaged(self) -> BadInput:
        return BadInput(f"{self.path} is damaged: the brackets of its JSON do not match; export or copy it again.")

    def _without_events(self, text: bytes) -> BadInput:
        if not text:
            return BadInput(f"{self.path} is blank; export the trace again, after the profiler has stopped.")
        try:
            keys = list(msgspec.json.decode(text))
        except ERRORS:
            return self._truncated()
        held = ", ".join(str(key) for key in keys[:5]) or "none"
        return BadInput(
            f"{self.path} has no `traceEvents` (its keys: {held}); give a trace that PyTorch's profiler exported."
        )


def _despite_faults(text: bytes, exact: Piece) -> Piece:
    """Stray quotes and brackets hide where events end, but not from who knows Kineto's layout."""
    layout = scan_layout(text)
    return layout if len(layout.events) > len(exact.events) and not is_json(b"[%b]" % text[: exact.until]) else exact


def _facts_by_line(text: bytes) -> dict[str, Any]:
    """Kineto writes a fact a line and quotes none of the strings that users add, so some lines may be no JSON."""
    facts = {}
    for name, value in _LINE.findall(text):
        with suppress(*ERRORS):
            facts[name.decode()] = msgspec.json.decode(value)
    return facts
