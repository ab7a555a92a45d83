"""What is known of a run as a whole, beside its spans: where it ran, what was recorded of it, how its steps went.

Plain data. Times are nanoseconds, of wall-clock time where nothing else is said; NONE stands for what nobody knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from keepbusy.timeline.files import typed
from keepbusy.timeline.races import DataRace

NONE = -1
"""What nobody knows, or what is not there."""
SCRIPT = "script"
"""Beside LOOP: why a window was opened, as recorders did before runs were logged whole."""
RUN, LOOP, LINE, IMPORTS, FIRST_USE = "run", "loop", "line", "imports", "first use of the GPU"
"""What a part of the run is."""
SIMULATED_TURNS = 4096
"""Turns that the queue of a loader is replayed for; of more, every so many are left out."""
USUAL_WORKERS = 8
"""Of a loader, that a prediction counts on unless it is told otherwise."""
USUAL_PREFETCH = 2
"""Batches that PyTorch lets each worker prepare ahead."""
_SLOWEST_LINK, _FASTEST_LINK = 0.001, 1e6
"""Bytes a nanosecond between which any link between host and device lies."""
_LARGEST_QUEUE = 1 << 20
"""No stream is known to take a thousandth part of so many commands before a launch blocks."""


def allocator_settings() -> str:
    """What the environment tells PyTorch's allocator; the first name is new in PyTorch 2.9, and counts for more."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def ran_nothing(source: str, computed_on_cpu: bool) -> str:
    """The sentence about a run that gave the GPU nothing to do."""
    if not computed_on_cpu:
        return f"{source} ran nothing on the GPU."
    return (
        f"{source} ran nothing on the GPU: its tensors stay on the CPU. Move the model and each batch to the GPU: "
        'model.to("cuda") and batch.to("cuda"), or an option of the script such as --device cuda.'
    )


@dataclass(frozen=True)
class RunFacts:
    """Of a run, or of one window of it."""

    source: str = ""  # the script or the trace, as the user named it
    sources: tuple[str, ...] = ()  # of ranks that came from several files
    command: tuple[str, ...] = ()  # what follows `keepbusy run` to run it again
    folder: str = ""  # where it was begun: places in files count from there
    device: str = ""
    pinned_bandwidth: float | None = None  # bytes a nanosecond that the device's link carries from pinned memory
    torch: str = ""
    allocator: str | None = None  # what the environment tells PyTorch's allocator; None where nobody looked
    world: int | None = None  # how many ranks the run has, where its traces say so
    groups: Mapping[int, int] = field(default_factory=dict)  # of each group of ranks: how many belong to it
    pending_limit: int | None = None  # commands that may be pending on a stream before a launch blocks
    virtual: bool = False
    logged: bool = False  # whether all calls of the driver were, on a real GPU
    rebuilt_within: float = 0.0  # and then, the share by which its waits for the GPU were predicted wrong
    values: bool = True  # whether a virtual run computed anything
    modelled: bool = False  # whether the host's time was modelled
    compiled_eagerly: bool = False  # whether a virtual run was asked for `torch.compile`, and ran its code as written
    stacks: bool = True  # whether lines were recorded
    skipped: int = 0  # events that could not be read
    recorded: tuple[int, ...] | None = None  # of a live recording: the number of the step that each mark ends
    plain_step: int | None = None  # what a step takes without the recorder
    plain_runs: Mapping[int, PlainRun] = field(default_factory=dict)  # of each rank, what marks told of the whole run
    run: Part | None = None  # its tree of loops, where it was watched
    loaders: tuple[LoaderUse, ...] = ()  # that it used, the one that it waited for longest first
    reason: WindowReason | None = None  # of a further window
    uneven: tuple[UnevenLoop, ...] = ()  # where its ranks differ
    notes: tuple[str, ...] = ()  # what the recorder has to say itself
    one_turn: bool = False  # a script without steps, which is explained whole
    traced: bool = False  # by a profiler, for whatever its user wanted: perhaps a single call
    marks_a_step: int = 0  # how many marks make one step, where the plain step is several of them
    cluster: Cluster | None = None  # of which only some ranks are kept whole
    first_steps: int = 0  # of a virtual run, that are not like those that follow, and are no longer marked
    loop: str = ""  # the one whose turns are the steps, where the run's tree of loops tells: file:line
    beside: tuple[int, ...] = ()  # of each rank's marks, by number, those that begin no turn: what follows lies beside
    races: tuple[DataRace, ...] = ()  # of a virtual run: uses of memory that nothing orders
    cut_short: CutShort | None = None  # None where the program came to its end

    @property
    def is_whole(self) -> bool:
        """Whether all of the run was recorded, from its first command to its last."""
        return self.virtual or self.logged

    @property
    def named(self) -> str:
        """As a complaint calls what was recorded."""
        return self.source or "the recording"

    @property
    def own_loop(self) -> Part | None:
        """The loop whose turns are the steps, in the run's tree."""
        return self.run.loop_at(self.loop) if self.run is not None and self.loop else None

    @property
    def runs_once(self) -> bool:
        """Whether it is a script that is one turn, and not the one turn of a loop, or one call, that was recorded."""
        is_part = (self.loop and not self.is_whole) or any(run.steps for run in self.plain_runs.values())
        return self.one_turn and not self.traced and not is_part

    def as_json(self) -> dict[str, Any]:
        """Only what differs from what is assumed of every run."""
        usual = RunFacts()
        return {name: value for name, value in asdict(self).items() if getattr(self, name) != getattr(usual, name)}

    @classmethod
    def of_json(cls, value: object) -> RunFacts:
        """What `as_json` gave; raises ValueError for anything else."""
        facts = typed(cls, value, "facts")
        if facts.pending_limit is not None and not 1 <= facts.pending_limit <= _LARGEST_QUEUE:
            raise ValueError(f"facts.pending_limit is {facts.pending_limit}")
        if facts.pinned_bandwidth is not None and not _SLOWEST_LINK <= facts.pinned_bandwidth <= _FASTEST_LINK:
            raise ValueError(f"facts.pinned_bandwidth is {facts.pinned_bandwidth}")
        return facts


@dataclass(frozen=True)
class CutShort:
    """How a run was ended before its own end. Its last iteration is incomplete, and its last line raised."""

    by: str  # the name of an exception, or of a signal
    place: str = ""  # the program's innermost line then: file:line
    within: tuple[str, ...] = ()  # the lines that it stood in, and those of the loops around them
    rank: int = NONE  # of several ranks, which one
    ended: int = 0  # when, by the system's clock, in ms

    @property
    def how(self) -> str:
        """`failed`, `interrupted` or `killed`."""
        if self.by == "KeyboardInterrupt":
            return "interrupted"
        return "killed" if self.by.startswith("SIG") else "failed"


@dataclass(frozen=True)
class WindowReason:
    """Why a window was recorded that is not that of the first steps."""

    why: str  # LOOP: another loop; SCRIPT: no loop at all
    place: str = ""  # of a loop: where it stands
    since: int = 0  # of a script: how long the run had gone on when it began


@dataclass(frozen=True)
class Cluster:
    """A run of more ranks than are kept whole: what each one's trace told when it was read."""

    ranks: tuple[RankTimes, ...]
    step: int  # as recorded
    typical: int  # what half of the ranks would take by themselves, at most
    stragglers: tuple[Straggler, ...] = ()
    world: int = 0  # how many ranks the run has


@dataclass(frozen=True)
class RankTimes:
    """One rank of many, a step of its recording."""

    rank: int
    host: str
    own: int  # what it would take, had it never to wait for a peer
    computing: int  # of that, its GPU
    waits: int  # within collectives, for who comes last
    behind: int  # of half of its peers, when it comes to a collective, on average
    last: float  # the share of its collectives to which it comes last
    kind: int  # ranks of one kind take part in the same collectives


@dataclass(frozen=True)
class Straggler:
    """A rank, or most ranks of a host, that take longer than the others of their kind."""

    host: str
    ranks: tuple[int, ...]
    late: int  # a step
    computing: bool  # whether it is the GPU that takes longer, else the host
    left: int  # what a step takes once it, and all before it, are like the others


@dataclass(frozen=True)
class Course:
    """How steps went over the run, a row for every `each` of them in a row."""

    each: int = 1
    step: tuple[int, ...] = ()  # the median
    longest: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()  # the median, NONE where nobody knows
    ended: tuple[int, ...] = ()  # when the last of them did, on the host's clock


@dataclass(frozen=True)
class PlainRun:
    """What marks alone tell of a rank's whole run, most of which nobody looked at closely."""

    marked_by: str  # "step", "optimizer", "forward" or "graph"; "nobody" where no step was announced
    steps: int  # plain ones, without those of the warm-up
    step: int  # what one takes, stalls left out
    low: int  # nine in ten take longer
    high: int  # one in ten takes longer
    warm_up: int = 0  # steps at the beginning that are not like the others
    warm_up_time: int = 0
    host: int = NONE  # what a step takes of a host that nothing holds up, where that does not set the pace
    lead: int = NONE  # of the host at the end of a step, typically
    no_lead: float = 0.0  # share of the steps at whose end the host had none
    input: int = 0  # what a step waits for its input
    collector: int = 0  # what the garbage collector takes of a step
    requests: float = 0.0  # for memory from the driver, a step, after the warm-up
    retries: int = 0  # of allocations that found the memory full, after the warm-up
    delayed: float = 0.0  # share of the run in which the program's thread was ready and had no processor
    course: Course = Course()
    fault: str = ""  # why marks ended before the run did


@dataclass(frozen=True)
class Part:
    """The run as a tree: a loop of it, or a line beside its loops, and what that contains.

    A loop's parts are the loops within it; what its turns do beside those is in its lines. The parts and lines of the
    root sum to the run.
    """

    kind: str
    place: str = ""  # file:line
    source: str = ""  # the line's text
    function: str = ""
    began: int = 0  # since the run's first moment
    time: int = 0
    busy: int = NONE  # of that time the GPU was at work
    turns: int = 0  # 0 where nobody counted them
    passes: int = NONE  # of the turns of the loop around it, in how many it turned; NONE where nobody counted
    at_least: bool = False  # the turns before the loop was noticed, or beyond what is counted, are missing
    turn: int = NONE  # the mean
    low: int = NONE  # of ten turns, the second fastest and the second slowest
    high: int = NONE
    warm_up: int = 0  # turns at the beginning that are not like those that follow
    warm_up_time: int = 0
    kinds: tuple[SlowTurns, ...] = ()  # of turns that take far longer than the others, the largest first
    lines: tuple[LineTime, ...] = ()  # the longest first
    parts: tuple[Part, ...] = ()  # in the order of the run
    clock: int = NONE  # of the run itself: its first moment, on the clock by which its steps are timed
    shares: tuple[int, ...] = ()  # of the run itself: percent of each equal stretch in which the GPU was at work
    decides: tuple[str, ...] = ()  # of the run itself: lines that work out what the program chooses by
    beside: tuple[LineTime, ...] = ()  # of the run itself: how long its other threads had a processor, by line
    ran: int = NONE  # of the run itself: how long the thread that it is about had one

    @property
    def named(self) -> str:
        return loop_name(self.place, self.function)

    def comes_rarely(self, around: Part) -> bool:
        """Whether most turns of the loop around this one pass without it, as where a trainer evaluates the model."""
        return self.kind == LOOP and 0 <= 2 * self.passes < around.turns

    @property
    def waits(self) -> int:
        return NONE if self.busy == NONE else max(0, self.time - self.busy)

    @property
    def usual(self) -> int:
        """What a turn takes on average once the loop is warm, but for turns that take longer without any rule."""
        longer = self.warm_up_time + sum(one.total for one in self.kinds if not one.regular)
        return NONE if self.turn == NONE else max(self.low, self.turn - longer // max(1, self.turns))

    def within(self) -> Iterator[Part]:
        """This part and all that it contains."""
        yield self
        for part in self.parts:
            yield from part.within()

    def loop_at(self, name: str) -> Part | None:
        """The loop of this name; where only its line is known, of several that a trainer holds there the one that
        turns most, if most of the time passes in it."""
        loops = [part for part in self.within() if part.kind == LOOP]
        there = [part for part in loops if part.named == name] or [part for part in loops if part.place == name]
        longest = max((part.time for part in there), default=0)
        return max((part for part in there if 2 * part.time >= longest), key=lambda part: part.turns, default=None)


def loop_name(place: str, function: str) -> str:
    """What a loop is called where it is spoken of: of a library's, several may stand at one line of the program."""
    return f"{place} ({function})" if ":" in function else place


def place_of_loop(name: str) -> str:
    """The program's own line: file:line."""
    return name.partition(" (")[0]


@dataclass(frozen=True)
class LineTime:
    """A line of the program, how long the host was there, and how long the GPU had nothing to do meanwhile."""

    place: str  # file:line
    time: int
    idle: int = NONE
    call: str = ""  # what the line called into, where it is a library: a function's name
    within: str = ""  # the program's own line in there at which it mostly was: file:line


@dataclass(frozen=True)
class SlowTurns:
    """A kind of turn that takes far longer than the others: every so many of them, so much longer, on that line."""

    count: int
    every: float
    regular: bool
    longer: int  # typically
    total: int  # of all of them
    place: str = ""


@dataclass(frozen=True)
class UnevenLoop:
    """A loop around all others that takes one rank longer than the rest."""

    place: str  # file:line
    rank: int  # whom it takes longest
    turns: int  # of that rank
    longest: int
    mean: int  # of all ranks


@dataclass(frozen=True)
class LoaderUse:
    """A loader as the run used it: what it was given, how long batches took, how long the program waited for them."""

    place: str  # where the program made it, file:line
    workers: int
    prefetch: int  # batches that each worker prepares ahead
    batches: int
    waited: int  # the program, for its batches
    began: int = 0  # of that, for the first batch of each pass: workers start then
    in_worker: int = NONE  # what one batch takes a worker, or the program where it has none
    looped: int = 0  # from the first batch of each pass to its last one
    cores: int = 0
    rank: int = 0
    passes: int = 1
    turns: tuple[int, ...] = ()  # what the program did besides waiting: the mean of every `each` turns of its loop
    each: int = 1
    busy: int = NONE  # workers that gave any batch; NONE where nobody counted

    @property
    def idle(self) -> int:
        """Workers that had nothing to prepare."""
        return max(0, self.workers - self.busy) if self.busy > 0 else 0

    @property
    def turn(self) -> float:
        """What a turn of its loop typically takes besides waiting for the batch."""
        return max(1.0, float(median(self.turns))) if self.turns else self._mean

    @property
    def _mean(self) -> float:
        return max(1.0, (self.looped - (self.waited - self.began)) / max(1, self.batches))

    def enough(self, shorter: float = 0.0, least: float = 1.0) -> int:
        """The number of workers with which the run waits least, as far as there are cores, were each turn that much
        shorter and none shorter than `least`; what workers take to start is a wait, too."""
        if self.in_worker == NONE:
            return NONE
        costs = dict[int, int]()
        for workers in range(max(1, self.workers), max(self.workers, self.cores - 1, 1) + 1):
            waits = self.waits_with(workers, shorter, least)
            costs[workers] = waits + self.starting(workers - self.workers)
            if not waits:
                break
        return min(costs, key=lambda workers: costs[workers])

    def pace(self, workers: int) -> float:
        """Nanoseconds from one batch to the next, however soon it is asked for."""
        return self.in_worker / workers if self.in_worker != NONE and workers else 0.0

    def starting(self, workers: int) -> int:
        """What it takes to start so many workers for each pass, whose first batch waits for that, too."""
        first = self.began - self.passes * max(0, self.in_worker)
        return round(max(0, first) / self.workers * workers) if self.workers else 0

    def saved_with(self, workers: int, least: int) -> int:
        """What the run would no longer wait with so many, were no turn shorter than `least`."""
        saved = self.waited - self.began - self.waits_with(workers) - self.starting(workers - self.workers)
        return min(saved, self.looped - self.batches * least)

    def waits_with(self, workers: int, shorter: float = 0.0, least: float = 1.0) -> int:
        """How long the program would wait for batches, but the first of each pass.

        Each worker prepares its batches one after the other, and the next one is sent to it when the program takes
        one. A turn that takes long fills the queue and no more, so the turns are gone through one by one.
        """
        if self.in_worker == NONE or not workers:
            return self.waited - self.began
        a_pass = -(-self.batches // max(1, self.passes))
        several = min(self.each, max(1, SIMULATED_TURNS // max(1, len(self.turns))))
        turns = [max(least, turn - shorter) for turn in self.turns or [self._mean] * min(self.batches, SIMULATED_TURNS)]
        turns = [turn for turn in turns for _ in range(several)]
        ahead, waited = workers * max(1, self.prefetch or USUAL_PREFETCH), 0.0
        for first in range(0, len(turns), a_pass):
            waited += _waited(turns[first : first + a_pass], self.in_worker, workers, ahead)
        return round(waited * self.batches / max(1, len(turns)))


def _waited(turns: list[float], prepares: float, workers: int, ahead: int) -> float:
    """Of one pass, from its second batch on."""
    free, took, now, waited = [0.0] * workers, list[float](), 0.0, 0.0
    for number, turn in enumerate(turns):
        sent = took[number - ahead] if number >= ahead else 0.0
        ready = free[number % workers] = max(sent, free[number % workers]) + prepares
        waited += max(0.0, ready - now) if number else 0.0
        now = max(now, ready)
        took.append(now)
        now += turn
    return waited
