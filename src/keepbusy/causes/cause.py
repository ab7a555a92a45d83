"""What every cause has: its texts, how it is found, and where it was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.places import Where, by_place
from keepbusy.timeline.edit import Edit
from keepbusy.timeline.model import NONE, Ints, Timeline


@dataclass(frozen=True)
class LedgerPlace:
    """An entry in the ledger of a step, as reports and documents show it."""

    name: str
    label: str
    colour: str
    sentence: str
    happens: str = ""  # `happens` and `fixed_by` stand in the documents
    fixed_by: str = "–"
    letter: str = "·"  # in a picture made of characters


@dataclass(frozen=True, eq=False)
class Finding:
    """A cause as it was found."""

    cause: str
    edit: Edit
    culprit: Ints  # for each row that the edit touches, the row to blame; NONE elsewhere
    rows: Ints  # the rows to blame
    count: int  # how often it happened
    places: Mapping[Where, Ints] = field(default_factory=dict)
    """The rows to blame by place in the program. The place with the longest rows comes first."""
    _parts: dict[bytes, Edit] = field(default_factory=dict, repr=False)

    def only(self, rows: Ints) -> Edit:
        """The edit of these culprits alone. The same rows return the same object, so that each is replayed once."""
        key = rows.tobytes()
        if key not in self._parts:
            self._parts[key] = self.edit.only(np.isin(self.culprit, rows))
        return self._parts[key]


class FindingBuilder:
    """A finding while its cause writes down the edit."""

    def __init__(self, cause: str, timeline: Timeline) -> None:
        self.cause, self.edit = cause, Edit.nothing(timeline)
        self.culprit = np.full(len(timeline), NONE, np.int64)
        self.count: int | None = None  # set if it is not the number of rows to blame

    def finding(self) -> Finding:
        culprit = np.where(self.edit.touched, self.culprit, NONE)
        rows = np.unique(culprit[culprit != NONE])
        return Finding(self.cause, self.edit, culprit, rows, len(rows) if self.count is None else self.count)


def places_of(inputs: CauseInputs, finding: Finding) -> dict[Where, Ints]:
    """The rows to blame by place, the place with the longest rows first. That is cheap, and good enough to choose which
    places to replay."""
    spans, blamed = inputs.timeline.spans, finding.culprit != NONE
    duration = np.bincount(finding.culprit[blamed], (spans.end - spans.start)[blamed], len(spans))
    places = by_place(inputs, finding.rows, finding.cause)
    return dict(sorted(places.items(), key=lambda item: -duration[item[1]].sum()))


class CauseKind:
    """A reason why a GPU waits: finds it in a run, and writes down the edit that fixes it everywhere."""

    place: ClassVar[LedgerPlace]
    what: ClassVar[str]
    """What happened: `{often}`, `{launches}`, `{moved}` and `{per}` become figures. Durations are left to reports."""
    lesson: ClassVar[str] = ""
    """What to learn from it in a script without iterations, where it costs nothing. In a loop it would."""
    among_ranks: ClassVar[bool] = False
    """True if only runs with several ranks can have it."""
    is_residual: ClassVar[bool] = False
    """True if every program has a little of it and its fix removes nearly every wait: other causes come first."""

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        raise NotImplementedError

    def what_happened(self, inputs: CauseInputs, finding: Finding) -> str:  # noqa: ARG002
        return self.what

    def lesson_at(self, inputs: CauseInputs, row: int) -> str:  # noqa: ARG002
        return self.lesson
