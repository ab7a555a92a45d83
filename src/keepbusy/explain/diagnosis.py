"""The result of `explain`: plain data from which reports are made.

Times are nanoseconds per plain step (a step of the run without a profiler).
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
"""Causes that no edit of a timeline removes."""
RESIDUAL = tuple(cause for cause, kind in KINDS.items() if kind.is_residual)


@dataclass(frozen=True)
class Site:
    """One place, how often per step it is reached, and the wait it is to blame for."""

    where: Where
    count: float
    wait: int


@dataclass(frozen=True)
class Prediction:
    """The predicted duration of a step, with its range."""

    step: int
    low: int
    high: int


@dataclass(frozen=True)
class Cause:
    """Why the GPU waits, what that costs, and what fixing it would save."""

    cause: str
    wait: int  # what fixing it alone removes; two causes may share a wait, which the ledger counts once
    count: float  # occurrences per step
    sites: tuple[Site, ...]  # the costliest first
    what: str  # one sentence with figures: what happened
    fix: str  # the fix's name, as the plan calls it
    advice: str  # one sentence: what to do
    remedy: str  # one line of code
    api: str  # dotted name of what the remedy uses: keepbusy.prefetch, torch.cuda.graph
    predicted: Prediction  # the step once this cause alone is fixed everywhere
    same_wait_as: str = ""  # an earlier cause with the same wait: fixing one of the two is enough

    @property
    def where(self) -> Where:
        return self.sites[0].where if self.sites else Where()


@dataclass(frozen=True)
class Harmless:
    """A cause at a place where it costs nothing."""

    cause: str
    where: Where
    count: float
    why: str  # one sentence: "the step is launch-bound, so the host would not have been ahead anyway"
    gain: int = 0  # what fixing the cause alone would save; less than the noise
    held: int = 0  # how long Python was blocked there, per step


@dataclass(frozen=True)
class PlannedFix:
    """A remedy at its places. With it and all fixes before it, an iteration of its loop takes `predicted`."""

    fix: str  # prefetch, readback, graph, ...
    where: tuple[Where, ...]  # the lines that it changes, the costliest first
    causes: tuple[str, ...]
    gain: int  # what it saves per iteration, on top of all fixes before it
    predicted: Prediction
    alone: int  # what it would save by itself
    run_gain: int = NONE  # what it saves the whole run, if that is known
    once: int = 0  # what it costs the run once, such as a graph's capture and its comparisons with the step
    needs: tuple[str, ...] = ()  # fixes without which it saves nothing
    instead: tuple[str, ...] = ()  # fixes of the same wait, any of which would do
    advice: str = ""
    code: str = ""
    api: str = ""
    blockers: tuple[Where, ...] = ()  # lines that prevent a better fix, such as reads within a graph
    edit: Edit | None = field(default=None, compare=False, repr=False)  # what it changes in the explained iterations
    reason: str = ""  # a sentence with figures, if only the plan knows the reason
    loop: str = ""  # the place of its loop, if that is not the loop of the steps
    late: tuple[LateRank, ...] = ()  # the ranks that the others wait for
    captured: tuple[CapturedLines, ...] = ()  # a graph's lines, first the function that launches most

    @property
    def first(self) -> str:
        """The need that a person has to fulfil before this fix is possible: `create_on_gpu at train.py:31`."""
        return next((need for need in self.needs if need.startswith("create_on_gpu")), "")

    @property
    def named(self) -> str:
        return named(self.fix, self.where)

    @property
    def is_beside_steps(self) -> bool:
        """Whether it is in another loop than the steps, so that only its gain in the whole run counts."""
        return bool(self.loop)


@dataclass(frozen=True)
class LoopDiagnosis:
    """Another loop of the run, with its iterations explained as steps."""

    place: str
    turns: int
    diagnosis: Diagnosis


class Gaps(NamedTuple):
    """When a GPU is idle, and the command that ends each gap."""

    start: Ints
    end: Ints
    row: Ints


@dataclass(frozen=True, eq=False)
class Turns:
    """Whole iterations without their recorder, to be drawn: the line of each span, and the cause of each gap.

    Columns have an entry for each row of the timeline. A gap has the one cause whose fix removes most of it. The ledger
    has the sums, and counts waits once that two causes share.
    """

    timeline: Timeline
    ratio: float  # the plain step divided by the step that the unchanged timeline replays to
    places: tuple[Where, ...]  # lines of the program
    place: Ints  # the index in `places`, or NONE
    call: Ints  # the name of what the program called there, or NONE
    cause: Ints  # for a command that ends a gap: the gap's cause, as an index in CAUSES
    rest: Ints  # for the same command: the cause of what remains of the gap once that one is fixed
    culprit: Ints  # for the same command: the row to blame, or NONE
    aside: Ints  # for a copy or collective that should overlap with computing: the cause, as an index in CAUSES

    def gaps(self, rank: int, row: Ints, start: Ints, end: Ints) -> Gaps:
        """When a rank's GPU is idle, if these rows run at these times."""
        spans = self.timeline.spans
        rows_of_rank = (self.timeline.on_device & (self.timeline.rank_of_rows == rank))[row]
        row, end = row[rows_of_rank], end[rows_of_rank]
        start = at_work_from(spans.kind[row], start[rows_of_rank], end, spans.work[row])
        order = np.argsort(start, kind="stable")
        row, start, reached = row[order], start[order], np.maximum.accumulate(end[order])
        is_gap = start[1:] > reached[:-1]
        return Gaps(reached[:-1][is_gap], start[1:][is_gap], row[1:][is_gap])

    def blame(self, row: int) -> tuple[str, Where | None]:
        """The cause of the gap that a command ends, and the line to blame if that is known."""
        culprit, cause = int(self.culprit[row]), int(self.cause[row])
        place = int(self.place[culprit]) if culprit != NONE else NONE
        return CAUSES[cause] if cause != NONE else "unknown", self.places[place] if place != NONE else None

    def edit_of(self, fix: PlannedFix) -> Edit | None:
        """What the fix changes in these iterations. None for a fix in another loop."""
        edit = fix.edit
        if edit is None or fix.is_beside_steps or len(edit.drop) != len(self.timeline):
            return None
        return edit


@dataclass(frozen=True)
class Diagnosis:
    """A run explained. The ledger sums to the plain step."""

    plain_step: int
    plain_given: bool  # whether the plain step was measured without a profiler; if not, it is the trace's own step
    traced_step: int
    steps: int  # whole steps in the window
    ledger: Mapping[str, int]  # entries that are not zero
    causes: tuple[Cause, ...]  # by predicted gain, largest first
    harmless: tuple[Harmless, ...]
    predicted: Prediction  # the step once all causes are fixed, or those of `--what-if`
    noise: int  # no smaller gain is claimed
    ranks: tuple[int, ...] = (0,)
    late: tuple[LateRank, ...] = ()
    fixed: tuple[str, ...] = ()  # the causes that `--what-if` named
    device: str = ""  # "NVIDIA H200"
    sources: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # what follows `keepbusy run` to run it again
    folder: str = ""  # the working directory of the run, to which paths are relative
    notes: tuple[str, ...] = field(default_factory=tuple)  # what the reader should know, a sentence each
    plain_runs: Mapping[int, PlainRun] = field(default_factory=dict)  # by rank: what marks show of the whole run
    one_turn: bool = False  # a script without steps, whose one "step" is the whole script
    plan: tuple[PlannedFix, ...] = ()  # in the order in which to do them
    run: Part | None = None  # the whole run, if it was watched
    cluster: Cluster | None = None  # all ranks, if only some were kept whole
    run_steps: int = 0  # the steps of the whole run, if each was recorded: on a virtual GPU
    loop: str = ""  # the place of the loop of the steps, if the run's tree has it: file:line
    loops: tuple[LoopDiagnosis, ...] = ()  # other loops that were explained
    cut_short: CutShort | None = None  # what ended the run early
    races: tuple[DataRace, ...] = ()  # uses of memory that nothing orders, found in virtual runs
    stretches: tuple[int, ...] = ()  # the median step in equal parts of the run, in order
    is_modelled: bool = False  # whether its times are the same in every run
    turns: Turns | None = field(default=None, compare=False, repr=False)  # what drawing needs, if it was requested
    draw: Callable[[], Turns] | None = field(default=None, compare=False, repr=False)  # computes that later

    def _repr_html_(self) -> str | None:
        import keepbusy  # here, since keepbusy imports this room

        return keepbusy.in_a_notebook(self)

    def with_turns(self) -> Diagnosis:
        """The same with what drawing needs, also for its other loops."""
        loops = tuple(replace(loop, diagnosis=loop.diagnosis.with_turns()) for loop in self.loops)
        return replace(self, turns=self.turns or (self.draw() if self.draw else None), loops=loops)

    def iteration_of(self, loop: str) -> int:
        """What an iteration of a loop takes; 0 and `NONE` as of `usual_of`. Where Python is far ahead, its own are
        shorter than those of the GPU."""
        usual, part = self.usual_of(loop), self.run.loop_at(loop) if self.run is not None else None
        if usual <= 0 or part is None:
            return usual
        steps = {other.place: other.diagnosis.plain_step for other in self.loops} | {self.loop: self.plain_step}
        return max(usual, min(steps.get(loop, 0), part.time // part.turns))  # sooner or later Python waits

    def usual_of(self, loop: str) -> int:
        """The usual duration of an iteration of a loop in the run's tree; 0 if not all of it was counted, `NONE` if the
        tree has no such loop."""
        part = self.run.loop_at(loop) if self.run is not None and loop else None
        if self.run is None or part is None:
            return NONE
        outer = [other for other in self.run.within() if other.place == part.place and part in other.parts]
        return max(0, part.usual) if all(other.turns for other in outer) else 0

    @property
    def given(self) -> tuple[int, ...]:
        """All ranks that were read, also those of which only figures were kept."""
        return self.ranks if self.cluster is None else tuple(rank.rank for rank in self.cluster.ranks)

    @property
    def steps_of_run(self) -> int:
        """How many steps a fix applies to: those of the whole run, or only the recorded ones if these are not like the
        others."""
        runs = [self.plain_runs[rank] for rank in self.ranks if rank in self.plain_runs]
        if runs and not self.plain_given:
            return self.steps
        return self.run_steps or (runs[0].steps + runs[0].warm_up if runs else 0)

    @property
    def waiting(self) -> int:
        return sum(time for place, time in self.ledger.items() if place in CAUSES)
