"""What an explanation says. Plain data, of which reports are made; only who draws the turns asks for them too.

Times are nanoseconds a step, of the plain step (the run without a profiler).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, reduce
from hashlib import blake2b
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from keepbusy.timeline.model import NONE, Floats, Ints, Mask, Timeline
from keepbusy.timeline.races import DataRace
from keepbusy.timeline.replay import at_work_from
from keepbusy.timeline.run_facts import Cluster, CutShort, Part, PlainRun

# every place that a nanosecond of the plain step can go, in the order in which reports show them
COMPUTING, COPYING, WIRE = "computing", "copying", "collective"
CAUSES = (
    "host_sync",
    "blocking_copy",
    "copy_not_overlapped",
    "input_late",
    "made_on_host",
    "launch_bound",
    "allocator",
    "host_work",
    "peer_late",
    "exposed_collective",
    "pipeline_bubble",
    "unknown",
)
UNFIXABLE = ("pipeline_bubble", "unknown")
"""Causes that no edit of a timeline takes away."""
RESIDUAL = ("launch_bound", "host_work")
"""Causes that every program has a little of, and whose fix takes nearly every wait away: others are more particular."""
PLACES = (COMPUTING, COPYING, WIRE, *CAUSES)


@dataclass(frozen=True)
class Where:
    """A place in the user's program, as exactly as the recording knows it."""

    file: str = ""
    line: int = 0
    function: str = ""
    exact: bool = False  # else the line is the function's, not the call's
    operator: str = ""  # what it called: aten::item, cudaStreamSynchronize
    around: str = ""  # without stacks: the annotation or operator around it and its neighbours
    library: str = ""  # the library's frame, when the call stands inside one

    @staticmethod
    def of(place: str) -> Where:
        """Of `train.py:31`, as the run's tree names places; of other words just these."""
        file, _, line = place.rpartition(":")
        return Where(file=file, line=int(line), exact=True) if line.isdecimal() else Where(file=place)

    @property
    def is_known(self) -> bool:
        """Whether it is a line of the program, or within what the program calls by a name; else a call of CUDA's."""
        return bool(self.file) or self.around.startswith("in ")

    def __str__(self) -> str:
        if self.file:
            return f"{self.file}:{self.line}"
        return self.around or self.operator or "unknown place"


class CapturedLines(NamedTuple):
    """What graphs hold of one function: its lines that launch into them, and those at which something has to stay."""

    file: str
    function: str
    launching: tuple[tuple[int, int], ...]
    """Lines, and how many launches of each a step's graphs hold."""
    staying: tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """One place, how often a step it is met, and the wait it is to blame for."""

    where: Where
    count: float
    wait: int


@dataclass(frozen=True)
class Prediction:
    """A step that nobody has run yet, with its range."""

    step: int
    low: int
    high: int


@dataclass(frozen=True)
class Cause:
    """Why the GPU waits, what that costs, and what fixing it would give."""

    cause: str
    wait: int  # what fixing it alone takes away; two causes may share a wait, in the ledger each stands once
    count: float  # occurrences a step
    sites: tuple[Site, ...]  # the costliest first
    what: str  # one sentence with its figures: what happened
    fix: str  # the fix's name, as the plan calls it
    advice: str  # one sentence: what to do
    remedy: str  # one line of code
    api: str  # dotted name of what the remedy uses: keepbusy.prefetch, torch.cuda.graph
    predicted: Prediction  # the step once this cause alone is fixed everywhere
    same_wait_as: str = ""  # a cause before it whose fixing recovers the same wait: to fix one is enough

    @property
    def where(self) -> Where:
        return self.sites[0].where if self.sites else Where()


@dataclass(frozen=True)
class Harmless:
    """What was seen and costs nothing here."""

    cause: str
    where: Where
    count: float
    why: str  # one sentence: "the step is launch-bound, so the host would not have been ahead anyway"
    gain: int = 0  # what fixing the cause alone would give; less than the noise
    held: int = 0  # how long Python was held there, a step


UNLIMITED = 1 << 62
"""Of an edit: no limit to what a row takes."""


class SideLane(IntEnum):
    """Lanes that a fix opens next to the existing ones; what moves there holds nobody up unless it is the slowest."""

    STAY = 0
    FETCH = 1  # host to device, a step ahead
    RETURN = 2  # device to host, a step behind
    WIRE = 3  # collectives during the compute
    WORKERS = 4  # input prepared by other processes


@dataclass(frozen=True, eq=False)
class Edit:
    """What a fix changes in a timeline: for each row, what becomes of it. Edits of several fixes combine."""

    drop_wait: Mask  # it waits for nobody
    drop: Mask  # it leaves, and its time with it
    work: Ints  # it takes at most this long
    lane: Ints  # it moves to this `SideLane`
    capture: Mask  # a graph launches it
    scale: Floats  # it takes so many times as long

    @staticmethod
    def nothing(timeline: Timeline) -> Edit:
        return Edit(**{name: np.full(len(timeline), no) for name, (no, _) in _EDIT_COLUMNS.items()})

    @staticmethod
    def of(edits: Sequence[Edit], timeline: Timeline) -> Edit:
        """All of these as one."""
        return edits[0] if len(edits) == 1 else reduce(or_, edits, Edit.nothing(timeline))

    def __or__(self, other: Edit) -> Edit:
        return Edit(
            **{name: join(getattr(self, name), getattr(other, name)) for name, (_, join) in _EDIT_COLUMNS.items()}
        )

    def only(self, rows: Mask) -> Edit:
        """The same for these rows; nothing happens to the others."""
        return Edit(**{name: np.where(rows, getattr(self, name), no) for name, (no, _) in _EDIT_COLUMNS.items()})

    @cached_property
    def digest(self) -> bytes:
        """The same of edits that change the same: other causes, or other fixes of one, may come to that."""
        return blake2b(b"".join(getattr(self, name).tobytes() for name in _EDIT_COLUMNS)).digest()

    @property
    def touched(self) -> Mask:
        return np.logical_or.reduce([getattr(self, name) != no for name, (no, _) in _EDIT_COLUMNS.items()])

    def saves(self, work: Ints) -> Ints:
        """What each row that stays would lose."""
        return np.maximum(work - np.minimum(work, self.work) * self.scale, 0).astype(np.int64)


_EDIT_COLUMNS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "drop_wait": (False, np.logical_or),
    "drop": (False, np.logical_or),
    "work": (UNLIMITED, np.minimum),
    "lane": (int(SideLane.STAY), np.maximum),
    "capture": (False, np.logical_or),
    "scale": (1.0, np.multiply),
}
"""Of each column what stands where nothing happens, and how two edits of one row are one."""


@dataclass(frozen=True)
class LateRank:
    """A rank that its peers wait for."""

    rank: int
    late: int  # how much later than its peers it arrives, a step
    cause: str  # what it did meanwhile
    where: Where


@dataclass(frozen=True)
class PlannedFix:
    """A remedy at its place, as the plan names it: after it and all before it of its turns one takes `predicted`."""

    fix: str  # prefetch, readback, graph, ...
    where: tuple[Where, ...]  # the lines that it changes, the costliest first
    causes: tuple[str, ...]
    gain: int  # a turn, on top of all fixes before it
    predicted: Prediction
    alone: int  # what it would gain by itself
    run_gain: int = NONE  # what it saves the whole run, where that is known
    needs: tuple[str, ...] = ()  # fixes without which it gains nothing
    instead: tuple[str, ...] = ()  # fixes of the same wait: either of them
    advice: str = ""
    code: str = ""
    api: str = ""
    blockers: tuple[Where, ...] = ()  # lines that stand in the way of a better fix, such as reads within a graph
    edit: Edit | None = field(default=None, compare=False, repr=False)  # what it changes in the turns explained
    reason: str = ""  # a sentence with its figures, where only the plan tells why
    loop: str = ""  # of another loop than that of the steps: where it stands
    late: tuple[LateRank, ...] = ()  # the ranks that the others wait for
    captured: tuple[CapturedLines, ...] = ()  # of a graph: what it holds, first the function that launches most

    @property
    def first(self) -> str:
        """Of its needs the one that a person has to meet before this can be made: `create_on_gpu at train.py:31`."""
        return next((one for one in self.needs if one.startswith("create_on_gpu")), "")

    @property
    def named(self) -> str:
        return named(self.fix, self.where)

    @property
    def is_beside_steps(self) -> bool:
        """Whether it is no part of every step, so that its gain is one of the run: it stands in another loop."""
        return bool(self.loop)


def named(fix: str, where: Sequence[Where]) -> str:
    """A fix with its place, and how many more there are."""
    more = f" and {len(where) - 1} more" if len(where) > 1 else ""
    return f"{fix} at {where[0]}{more}" if where else fix


@dataclass(frozen=True)
class LoopDiagnosis:
    """Another loop of the run, and its turns explained as steps are."""

    place: str
    turns: int
    diagnosis: Diagnosis


class Gaps(NamedTuple):
    """When a GPU has nothing to do, and the command that ends each gap."""

    start: Ints
    end: Ints
    row: Ints


@dataclass(frozen=True, eq=False)
class Turns:
    """Whole turns without their recorder, for who draws them: where each span belongs in the program, why each gap is.

    Columns have a place for each row of the timeline. A gap has the cause whose fix takes most of it away. That is a
    picture's truth: the sums are in the ledger, where waits that two causes share are counted once.
    """

    timeline: Timeline
    ratio: float  # of the plain step to what the unchanged timeline replays to
    places: tuple[Where, ...]  # lines of the program
    place: Ints  # which of them each row belongs to, or NONE
    call: Ints  # the name of what the program called there, or NONE
    cause: Ints  # of the command that ends a gap: which of CAUSES the gap has
    rest: Ints  # which of them what is left of it has once that one is fixed
    culprit: Ints  # of the same command: the row to blame, or NONE
    aside: Ints  # of a copy or a collective that should run beside the compute: which of CAUSES says so

    def gaps(self, rank: int, row: Ints, start: Ints, end: Ints) -> Gaps:
        """Where a rank's GPU has nothing to do, if these rows run at these times."""
        spans = self.timeline.spans
        mine = (self.timeline.on_device & (self.timeline.rank_of_rows == rank))[row]
        row, end = row[mine], end[mine]
        start = at_work_from(spans.kind[row], start[mine], end, spans.work[row])
        order = np.argsort(start, kind="stable")
        row, start, reached = row[order], start[order], np.maximum.accumulate(end[order])
        found = start[1:] > reached[:-1]
        return Gaps(reached[:-1][found], start[1:][found], row[1:][found])

    def blame(self, row: int) -> tuple[str, Where | None]:
        """Of the gap that a command ends: its cause, and the line to blame where that is known."""
        culprit, cause = int(self.culprit[row]), int(self.cause[row])
        place = int(self.place[culprit]) if culprit != NONE else NONE
        return CAUSES[cause] if cause != NONE else "unknown", self.places[place] if place != NONE else None

    def edit_of(self, fix: PlannedFix) -> Edit | None:
        """What the fix changes in these turns: nothing, where it is a fix of others."""
        edit = fix.edit
        if edit is None or fix.is_beside_steps or len(edit.drop) != len(self.timeline):
            return None
        return edit


@dataclass(frozen=True)
class Diagnosis:
    """A run explained. The ledger sums to the plain step."""

    plain_step: int
    plain_given: bool  # measured without a profiler, by the user; else the trace's own step stands in for it
    traced_step: int
    steps: int  # whole steps in the window
    ledger: Mapping[str, int]  # PLACES that are not zero
    causes: tuple[Cause, ...]  # by predicted gain, largest first
    harmless: tuple[Harmless, ...]
    predicted: Prediction  # the step once all causes are fixed, or the ones asked for
    noise: int  # below this, no gain is claimed
    ranks: tuple[int, ...] = (0,)
    late: tuple[LateRank, ...] = ()
    fixed: tuple[str, ...] = ()  # the causes that `--what-if` named
    device: str = ""  # "NVIDIA H200"
    sources: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # what follows `keepbusy run` to run it again
    folder: str = ""  # where it was begun: places in files count from there
    notes: tuple[str, ...] = field(default_factory=tuple)  # what the reader should know, a sentence each
    plain_runs: Mapping[int, PlainRun] = field(default_factory=dict)  # by rank: what marks tell of the whole run
    one_turn: bool = False  # a script without steps: what is said of a step is said of the script
    plan: tuple[PlannedFix, ...] = ()  # in the order in which to do them
    run: Part | None = None  # the whole run, where it was watched
    cluster: Cluster | None = None  # all ranks, where only some of them were kept whole
    run_steps: int = 0  # that the run took, where each of them was recorded: on a virtual GPU
    loop: str = ""  # whose turns the steps are, where the run's tree knows it: file:line
    loops: tuple[LoopDiagnosis, ...] = ()  # other loops that were looked at
    cut_short: CutShort | None = None  # what ended the run before its own end
    races: tuple[DataRace, ...] = ()  # uses of memory that nothing orders, where the run was virtual
    stretches: tuple[int, ...] = ()  # the median step of each of some equal parts of the run, in their order
    is_modelled: bool = False  # its times are the same in every run
    turns: Turns | None = field(default=None, compare=False, repr=False)  # where somebody wants to draw them
    draw: Callable[[], Turns] | None = field(default=None, compare=False, repr=False)  # for who wants to later

    def _repr_html_(self) -> str | None:
        import keepbusy  # which knows how all rooms work together; only a notebook asks

        return keepbusy.in_a_notebook(self)

    def with_turns(self) -> Diagnosis:
        """The same, to be drawn: also its other loops."""
        loops = tuple(replace(one, diagnosis=one.diagnosis.with_turns()) for one in self.loops)
        return replace(self, turns=self.turns or (self.draw() if self.draw else None), loops=loops)

    @property
    def given(self) -> tuple[int, ...]:
        """All ranks that were read, also those of which little was kept."""
        return self.ranks if self.cluster is None else tuple(one.rank for one in self.cluster.ranks)

    @property
    def steps_of_run(self) -> int:
        """How many steps the whole run took: what a fix gains in each it gains so many times.

        Where what was recorded is not like them, what is said of it holds of no more than these steps themselves.
        """
        runs = [self.plain_runs[rank] for rank in self.ranks if rank in self.plain_runs]
        if runs and not self.plain_given:
            return self.steps
        return self.run_steps or (runs[0].steps + runs[0].warm_up if runs else 0)

    @property
    def waiting(self) -> int:
        return sum(time for place, time in self.ledger.items() if place in CAUSES)
