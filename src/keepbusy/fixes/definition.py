"""What every fix has: its name, its sentences, where it applies, what it changes in a timeline, and in a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from keepbusy.causes.cause import Finding, FindingBuilder
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.places import Where, named
from keepbusy.timeline.edit import Edit
from keepbusy.timeline.model import Ints

if TYPE_CHECKING:
    import libcst as cst
    from libcst.metadata import MetadataWrapper

LIFTED = "captured_"
"""What the names of functions begin with that statements were lifted into, to be captured as a graph."""


class Advice(NamedTuple):
    """What a fix says of itself: a sentence, a line of code, and the dotted name of what that line uses."""

    advice: str
    code: str = ""
    api: str = ""


class Remedy(NamedTuple):
    """A fix, with what it says at one place."""

    fix: Fix
    advice: str
    code: str = ""
    api: str = ""
    blockers: tuple[Where, ...] = ()  # lines that stand in the way of a better fix


class PlacedCause(NamedTuple):
    """A cause at one line of the program, for which a fix is looked for."""

    inputs: CauseInputs
    finding: Finding
    where: Where
    rows: Ints
    fixes: Sequence[Fix]
    """All that there are, in the order in which they are asked."""

    @property
    def cause(self) -> str:
        return self.finding.cause

    def of_sync(self, where: Where, rows: Ints) -> PlacedCause:
        """These rows, which wait for the GPU."""
        return self._replace(
            finding=FindingBuilder("host_sync", self.inputs.timeline).finding(), where=where, rows=rows
        )

    def remedy(self) -> Remedy:
        """That of the first fix that applies, else the usual one of the cause."""
        remedies = filter(None, (fix.remedy_at(self) for fix in self.fixes if self.cause in fix.causes))
        return next(remedies, None) or next(fix.usually(self.cause) for fix in self.fixes if self.cause in fix.usual)


@dataclass(frozen=True)
class SourceEdit:
    """What a fix writes into a source, how, and how far its losses may differ from the program's own; 0: not in a bit.
    `why`: they may, or do in some programs."""

    what: str
    write: Callable[[MetadataWrapper, frozenset[int]], cst.Module | None]
    tolerance: float = 0.0
    why: str = ""


class CapturedLines(NamedTuple):
    """What graphs hold of one function: its lines that launch into them, and those at which something has to stay."""

    file: str
    function: str
    launching: tuple[tuple[int, int], ...]
    """Lines, and how many launches of each a step's graphs hold."""
    staying: tuple[int, ...]
    fed: tuple[int, ...] = ()
    """Of those at which something stays: what stays are copies to the GPU, made before anything is computed."""
    masked: tuple[int, ...] = ()
    """Lines that choose by a mask which is always the same: they wait no more once its indices are taken."""
    ends_before_backward: bool = False
    """Whether a graph may end where a backward pass through it is still to come, and get a graph of that."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A remedy at the lines that it changes, and exactly what it changes there."""

    remedy: Remedy
    where: tuple[Where, ...]
    causes: tuple[str, ...]
    edit: Edit
    blocks_capture: bool = False  # waits between the launches of one step, so that these cannot be captured together
    share: float = 1.0  # of what the edit saves, as much as is expected of the fix
    bounds: tuple[Edit, ...] = ()  # the same at best and at worst, where that is not only a matter of recording
    reason: str = ""
    captured: tuple[CapturedLines, ...] = ()
    first: str = ""  # what has to be done elsewhere before

    @property
    def fix(self) -> Fix:
        return self.remedy.fix

    @property
    def named(self) -> str:
        return named(self.fix.name, self.where)

    @property
    def generality(self) -> int:
        """Fixes that change the program more than others: what is nearly as good without them comes first."""
        return 0 if self.bounds else max(GENERAL.get(cause, 0) for cause in self.causes)

    def at_best(self) -> Edit:
        return self.bounds[0] if self.bounds else self.edit

    def at_worst(self) -> Edit:
        return self.bounds[1] if self.bounds else self.edit

    def joined(self, other: Candidate) -> Candidate:
        places = {str(place) for place in self.where}
        bounds = (self.at_best() | other.at_best(), self.at_worst() | other.at_worst())
        return replace(
            self,
            where=(*self.where, *(place for place in other.where if str(place) not in places)),
            causes=tuple(dict.fromkeys([*self.causes, *other.causes])),
            edit=self.edit | other.edit,
            blocks_capture=self.blocks_capture or other.blocks_capture,
            bounds=bounds if self.bounds or other.bounds else (),
        )


GENERAL = {"host_work": 1, "launch_bound": 2}


class Fix:
    """One way to make a GPU wait less. The class attributes that are an `Advice` are all that it may say."""

    name: ClassVar[str]
    label: ClassVar[str]
    """Its name in reports."""
    advice: ClassVar[Advice]
    """What it says, where that is the same everywhere."""
    causes: ClassVar[tuple[str, ...]] = ()
    """Those for which it is asked whether it applies."""
    usual: ClassVar[Mapping[str, Advice]] = {}
    """Causes for which it is the fix where no other applies."""
    is_one_change: ClassVar[bool] = False
    """However many lines it concerns."""
    removes_wait: ClassVar[bool] = False
    """Nothing waits there any more, so that it can be captured."""
    leaves_statement: ClassVar[bool] = False
    """The statement that waited stands where it stood, and computes what it did."""
    is_gone_in_graph: ClassVar[bool] = False
    """Nothing needs to be written for that where a graph is captured."""
    is_not_for_loops: ClassVar[bool] = False
    """It removes no wait that comes again and again in one step."""
    is_uncertain: ClassVar[bool] = False
    """Some programs gain nothing by it."""
    served_by: ClassVar[tuple[str, ...]] = ()
    """Fixes whose edits of the source serve it, in the order in which they are tried; none where it is for a person."""
    is_asked_for: ClassVar[bool] = False
    """`run --fix` makes it only where it is named: results may differ then, by rounding or by a random seed, or a file
    is there a little later."""

    def applies(self, place: PlacedCause) -> bool:  # noqa: ARG002
        return False

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        """None where it does not apply."""
        return self.says() if self.applies(place) else None

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:  # noqa: ARG002
        """`usual`: with its cause's edit at its places, of which `place` is the first. What is different here."""
        return usual

    def source_edit(self) -> SourceEdit | None:
        """How it is written into a source, where it can be."""
        return None

    def suggested_edit(self) -> SourceEdit | None:
        """What a person may write, where it is more than keepbusy writes."""
        return self.source_edit()

    def says(self, advice: Advice | None = None, blockers: tuple[Where, ...] = ()) -> Remedy:
        return Remedy(self, *(advice or self.advice), blockers=blockers)

    def usually(self, cause: str) -> Remedy:
        return self.says(self.usual[cause])

    def advices(self) -> list[Advice]:
        return [value for value in vars(type(self)).values() if isinstance(value, Advice)] + [*self.usual.values()]


def all_or_nothing(inputs: CauseInputs, usual: Candidate) -> tuple[Edit, Edit]:
    """The bounds where nobody knows how much of it a GPU can do."""
    return usual.edit, Edit.nothing(inputs.timeline)


WHOLE_LOOP = ("input_late", "launch_bound", "allocator", "host_work")
"""Causes of a whole loop: wherever it waits, a fix of theirs is one change."""
