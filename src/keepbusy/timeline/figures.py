"""Formats times, shares, counts, sizes and lists for people. Nothing else in the project formats a time."""

from __future__ import annotations

NANOSECONDS = {"s": 1_000_000_000, "ms": 1_000_000, "µs": 1_000, "us": 1_000, "ns": 1}
"""The length of each unit of time, by the names that users write."""
_SHOWN = ("s", "ms", "µs")


def duration(time: int, like: int = 0) -> str:
    """`31.3 ms`, `820 µs`, `1.24 s`; in a column, all in the unit of the largest."""
    unit = unit_of(like or time)
    return f"{_in(unit, time)} {unit}" if time else "0 ms"


def transition(before: int, after: int) -> str:
    """Two times in the unit of the larger one: `31.3 → 8.9 ms`."""
    unit = unit_of(max(before, after))
    return f"{_in(unit, before)} → {_in(unit, after)} {unit}"


def span_of(low: int, high: int, like: int) -> str:
    """A range in the unit of `like`, which stands beside it: `8.4–10.1`; a larger one in its own: `0–3.9 ms`."""
    unit = unit_of(max(like, high))
    first, last = _in(unit, low), _in(unit, high)
    own = "" if unit == unit_of(like) else f" {unit}"
    return f"{first}{own}" if first == last else f"{first}–{last}{own}"


def figure(time: int, like: int) -> str:
    """The number alone, in the unit of `like`, which stands beside it."""
    return _in(unit_of(like), time)


def fixed(time: float, unit: str, digits: int) -> str:
    """The number alone, in a given unit with given digits: `4.1`."""
    return f"{time / NANOSECONDS[unit]:.{digits}f}"


def option(time: int) -> str:
    """In milliseconds, as `--plain-step` takes it: `31.3`."""
    return f"{time / NANOSECONDS['ms']:g}"


def unit_of(time: int) -> str:
    return next((unit for unit in _SHOWN if abs(time) >= NANOSECONDS[unit]), "µs")


def _in(unit: str, time: int) -> str:
    value = time / NANOSECONDS[unit]
    if not time:
        return "0"
    if unit == "µs":
        return f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"
    if unit == "s" or abs(value) < 0.095:
        return f"{value:.2f}" if abs(value) >= 0.005 else "<0.01" if value > 0 else "0"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


def share(part: int, whole: int) -> str:
    """`64%`; `<1%` for what rounds to nothing but is there."""
    percent = 100 * part / whole if whole else 0.0
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


def change(before: int, after: int) -> str:
    """`72% shorter`, `8% longer`, `3.0× as long`, `the same`."""
    percent = round(100 * (after - before) / before) if before else 0
    if not percent:
        return "the same"
    if percent > 100:
        return f"{after / before:.1f}× as long"
    return f"{abs(percent)}% {'shorter' if percent < 0 else 'longer'}"


def count(number: float) -> str:
    """`12`, `0.5`, `1.3`."""
    return f"{number:.0f}" if number >= 9.95 or abs(number - round(number)) < 0.05 else f"{number:.1f}"


def every(number: float, what: str) -> str:
    """`every step`, `every second step`, `every 21st step`."""
    whole = round(number)
    ending = "th" if whole % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(whole % 10, "th")
    which = {1: "", 2: "second ", 3: "third ", 4: "fourth ", 5: "fifth "}.get(whole, f"{whole}{ending} ")
    return f"every {which}{what}"


def times(count: float, per: str = " per iteration") -> str:
    """`once per iteration`, `12 times per iteration`. `per` is empty for a whole script."""
    if count < 2 / 3:
        return f"once in {round(1 / max(count, 1e-3))} iterations"
    rounded = round(count)
    return {1: "once", 2: "twice"}.get(rounded, f"{rounded:,} times") + per


def amount(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def listing(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)
