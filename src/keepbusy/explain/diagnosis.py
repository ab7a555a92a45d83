"""What an explanation says. Plain data, of which reports are made; only who draws the turns asks for them too.

Times are nanoseconds a step, of the plain step (the run without a profiler).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from keepbusy.causes import KINDS, LEDGER
from keepbusy.causes.late_ranks import LateRank
from keepbusy.causes.places import Where, named
from keepbusy.fixes.definition import CapturedLines
from keepbusy.timeline.edit import Edit
from keepbusy.timeline.model import NONE, Ints, Timeline
from keepbusy.timeline.races import DataRace
from keepbusy.timeline.replay import at_work_from
from keepbusy.timeline.run_facts import Cluster, CutShort, Part, PlainRun

COMPUTING, COPYING, WIRE = tuple(LEDGER)[:3]
CAUSES = tuple(LEDGER)[3:]
UNFIXABLE = tuple(cause for cause in CAUSES if cause not in KINDS)
"""Causes that no edit of a timeline takes away."""
RESIDUAL = tuple(cause for cause, kind in KINDS.items() if kind.is_residual)


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
    once: int = 0  # what it costs the run once, of a graph: its capture, and its comparisons with the step
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
    ledger: Mapping[str, int]  # those of its places that are not zero
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

    def usual_of(self, loop: str) -> int:
        """What an iteration of a loop of the run's tree usually takes; 0 where nobody counted."""
        part = self.run.loop_at(loop) if self.run is not None and loop else None
        return max(0, part.usual) if part is not None else 0

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
