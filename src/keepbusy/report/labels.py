"""Names of causes, fixes and places in reports, and how names from other people's files are shown."""

from __future__ import annotations

from keepbusy.causes import LEDGER
from keepbusy.causes.cause import LedgerPlace
from keepbusy.causes.places import Where
from keepbusy.fixes import BY_NAME


def tame(text: str, limit: int = 0) -> str:
    """Replace what could control a terminal, since names come from files, and cut the middle of what is too long."""
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    if not limit or len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def spot(where: Where, limit: int = 60) -> str:
    """A place as exactly as it is known: `train.py:31`, or `near train.py:14 in main`."""
    place = tame(str(where))
    if not where.file:  # `aten::item, after aten::mm`: its last parts are dropped first
        while len(place) > limit and ", " in place:
            place = place.rpartition(", ")[0]
        return cut(place, limit)
    place = place if len(place) <= limit else f"…{place[len(place) - limit + 1 :]}"
    if where.exact:
        return place
    return f"near {place}" + (f" in {tame(where.function, 40)}" if where.function else "")


def at(where: Where, limit: int = 60) -> str:
    """A place within a sentence: ` at train.py:31`, ` near train.py:14 in main`."""
    place = spot(where, limit)
    return f"{leading(place)}{place}"


def leading(place: str) -> str:
    """What joins a sentence and a place: a space if the place begins with a preposition, else ` at `."""
    return " " if place.startswith(("near ", "in ", "between ", "after ", "before ")) else " at "


def cut(text: str, limit: int) -> str:
    """Cut the end of what is too long."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def of_a_script(text: str) -> str:
    """A sentence about an iteration, reworded for a script that has no iterations."""
    return text.replace(" per iteration", "").replace(" one iteration later", " later")


# What causes and fixes are called


def ledger_place(place: str) -> LedgerPlace:
    """The label, sentence and colour of a place of the ledger, even of one that only a later version knows."""
    return LEDGER.get(place) or LedgerPlace(place, place, "#8b9099", place)


_LABELS = {
    **{name: fix.label for name, fix in BY_NAME.items()},
    "prepare_in_workers without persistent_workers": "use more loader workers, started in each epoch",
}


def fix(named: str) -> str:
    """A fix in words that users of PyTorch say, with its place if `named` has one: `readback at train.py:31`."""
    name, at_place, place = named.partition(" at ")
    return f"{_LABELS.get(name, name)}{at_place}{place}"


def files(sources: tuple[str, ...]) -> str:
    """One file by its name, several by their number."""
    if len(sources) == 1:
        return tame(sources[0].replace("\\", "/").rpartition("/")[2], 60)
    return f"{len(sources)} traces" if sources else ""
