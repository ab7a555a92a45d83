"""`keepbusy.guard`: a piece of code that may wait for the GPU so often, and not more.

with keepbusy.guard(syncs=0, blocking_copies=0):
    train_step(batch)

@keepbusy.guard(allow=["metrics.py: read once an epoch"])
def validate(model, loader): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from keepbusy.fix.gate import BLOCKING_COPY, SYNC, several
from keepbusy.fix.gate.allow_list import AllowList
from keepbusy.fix.gate.waits import WATCH, Wait

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 12
"""Places that a message names, the costliest first."""
_WIDTH = 90
"""Letters of a line that are shown."""


class TooManyWaits(AssertionError):  # noqa: N818 -- what was found
    """A guarded piece of code waited for the GPU more often than it may. `waits` are all that counted."""

    def __init__(self, message: str, waits: Sequence[Wait]) -> None:
        super().__init__(message)
        self.waits = tuple(waits)


def guard(syncs: int | None = 0, blocking_copies: int | None = 0, allow: Sequence[str] = ()) -> GuardedBlock:
    """Raise `TooManyWaits` at the end of a block, or of each call of a function, that waited for the GPU too often.

    `syncs`: how often Python may wait for a value or for the device; `blocking_copies`: how often for data on its way
    in, or for more than 64 KB on their way out. None: as often as it likes. `allow` names places that do not count,
    each with its reason: "train.py:42: read once an epoch", "metrics.py: ...", "log_metrics(): ...".

    Each thread is guarded by itself, with the backward passes that it starts. An error raised inside passes as it is.
    Without a GPU, real or virtual, nothing waits and nothing is counted.
    """
    return GuardedBlock(syncs, blocking_copies, allow)


class GuardedBlock:
    """A context manager, and a decorator. `waits` holds what was counted so far, `allowed` what was not, and why."""

    def __init__(self, syncs: int | None, blocking_copies: int | None, allow: Sequence[str]) -> None:
        self._limits = {SYNC: syncs, BLOCKING_COPY: blocking_copies}
        self._allow, self._given = AllowList(allow), tuple(allow)
        self.waits: list[Wait] = []
        self.allowed: list[tuple[Wait, str]] = []

    def __enter__(self) -> Self:
        self.waits, self.allowed = [], []
        self._leave = WATCH.listen(self._count)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._leave()
        if error is None:
            self._judge()

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with GuardedBlock(self._limits[SYNC], self._limits[BLOCKING_COPY], self._given):  # calls may overlap
                return function(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    def _count(self, wait: Wait) -> None:
        reason = self._allow.reason(wait.stack)
        if reason:
            self.allowed.append((wait, reason))
        else:
            self.waits.append(wait)

    def _judge(self) -> None:
        counts = {kind: [one for one in self.waits if one.kind == kind] for kind in self._limits}
        over = [kind for kind, limit in self._limits.items() if limit is not None and len(counts[kind]) > limit]
        if over:
            waits = [one for kind in over for one in counts[kind]]
            many = " and ".join(
                f"{several(len(counts[kind]), kind)} where {self._limits[kind] or 'none'} may be" for kind in over
            )
            raise TooManyWaits(f"{many}; {_cost(waits)}\n{told(waits)}", waits)


def told(waits: Sequence[Wait]) -> str:
    """The places of these waits, a paragraph each, the costliest first."""
    places: dict[tuple[Any, ...], list[Wait]] = {}
    for one in waits:
        places.setdefault((one.stack[:1], one.kind), []).append(one)
    ordered = sorted(places.values(), key=lambda group: -sum(one.duration or 0 for one in group))
    more = [f"and {len(ordered) - _SHOWN} more places"] if len(ordered) > _SHOWN else []
    return "\n".join([*(_paragraph(group) for group in ordered[:_SHOWN]), *more])


def _paragraph(group: list[Wait]) -> str:
    first = group[0]
    calls = ", ".join(sorted({one.call for one in group if one.call}))
    text = first.text if len(first.text) <= _WIDTH else f"{first.text[: _WIDTH - 1]}…"
    lines = [f"  {first.stack[0] if first.stack else 'somewhere in C++'}: {text}".rstrip(": ")]
    lines.append(f"    {several(len(group), first.kind)}{f' ({calls})' if calls else ''}; {_cost(group)}")
    lines += [f"    called from {line}" for line in first.stack[1:]]
    return "\n".join(lines)


def _cost(waits: Sequence[Wait]) -> str:
    known = [one.duration for one in waits if one.duration is not None]
    if not known:
        return "how long Python waited was not measured"
    least = "at least " if len(known) < len(waits) else ""
    return f"Python waited {least}{sum(known) / 1e6:.3g} ms"
