"""Facts about a run as a whole, besides its spans: where it ran, what was recorded, how its steps went.

Plain data. Times are nanoseconds of wall-clock time unless stated otherwise. NONE means unknown.
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
"""Unknown, or missing."""
SCRIPT = "script"
"""Why a window was opened, as LOOP is. Recorders opened such windows before runs were logged whole."""
RUN, LOOP, LINE, IMPORTS, FIRST_USE = "run", "loop", "line", "imports", "first use of the GPU"
"""The kinds of parts of a run."""
SIMULATED_ITERATIONS = 4096
"""Iterations for which the queue of a loader is replayed. Of more, only some are."""
USUAL_WORKERS = 8
"""Loader workers that a prediction counts on by default."""
USUAL_PREFETCH = 2
"""Batches that PyTorch lets each worker prepare ahead."""
_SLOWEST_LINK, _FASTEST_LINK = 0.001, 1e6
"""Bytes a nanosecond: the limits for any link between host and device."""
_LARGEST_QUEUE = 1 << 20
"""A thousand times the commands that any known stream takes before a launch blocks."""


def allocator_settings() -> str:
    """The environment's settings of PyTorch's allocator. PyTorch prefers the first name, which is new in 2.9."""
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
    """Facts about a run, or one window of it."""

    source: str = ""  # the script or the trace, as the user named it
    sources: tuple[str, ...] = ()  # if ranks came from several files
    command: tuple[str, ...] = ()  # the arguments of `keepbusy run` that repeat the run
    folder: str = ""  # its working directory, to which paths are relative
    device: str = ""
    pinned_bandwidth: float | None = None  # bytes a nanosecond from pinned memory to the device
    torch: str = ""
    allocator: str | None = None  # the environment's settings of PyTorch's allocator; None if unknown
    world: int | None = None  # how many ranks the run has, if its traces show it
    groups: Mapping[int, int] = field(default_factory=dict)  # the number of ranks in each group
    pending_limit: int | None = None  # commands that may be pending on a stream before a launch blocks
    virtual: bool = False
    logged: bool = False  # whether all calls of the driver were logged, on a real GPU
    rebuilt_within: float = 0.0  # for a logged run, the relative error of its predicted waits for the GPU
    values: bool = True  # whether a virtual run computed anything
    modelled: bool = False  # whether the host's time was modelled
    compiled_eagerly: bool = False  # whether a virtual run called `torch.compile`, whose code it ran as written
    stacks: bool = True  # whether lines were recorded
    skipped: int = 0  # events that could not be read
    recorded: tuple[int, ...] | None = None  # for a live recording: the number of the step that each mark ends
    plain_step: int | None = None  # the duration of a step without the recorder
    plain_runs: Mapping[int, PlainRun] = field(default_factory=dict)  # by rank: what marks show of the whole run
    run: Part | None = None  # its tree of loops, if it was watched
    loaders: tuple[LoaderUse, ...] = ()  # the one that the run waited for longest first
    reason: WindowReason | None = None  # for a further window
    uneven: tuple[UnevenLoop, ...] = ()  # loops in which ranks differ
    notes: tuple[str, ...] = ()  # sentences by the recorder
    one_turn: bool = False  # a script without steps, which is explained as one step
    traced: bool = False  # recorded by a profiler, perhaps of a single call
    marks_a_step: int = 0  # how many marks make one step, if the plain step is several of them
    cluster: Cluster | None = None  # if only some ranks are kept whole
    first_steps: int = 0  # of a virtual run: unlike those that follow, and therefore no longer marked
    loop: str = ""  # the loop of the steps, if the run's tree shows it: file:line
    beside: tuple[int, ...] = ()  # numbers of each rank's marks that begin no iteration, but what lies beside the loop
    races: tuple[DataRace, ...] = ()  # of a virtual run: uses of memory that nothing orders
    cut_short: CutShort | None = None  # None if the program ended by itself

    @property
    def is_whole(self) -> bool:
        """Whether all of the run was recorded, from its first command to its last."""
        return self.virtual or self.logged

    @property
    def named(self) -> str:
        """The recording's name in error messages."""
        return self.source or "the recording"

    @property
    def own_loop(self) -> Part | None:
        """The loop of the steps, in the run's tree."""
        return self.run.loop_at(self.loop) if self.run is not None and self.loop else None

    @property
    def runs_once(self) -> bool:
        """Whether it is a script without steps, rather than a recording of one iteration or one call."""
        is_part = (self.loop and not self.is_whole) or any(run.steps for run in self.plain_runs.values())
        return self.one_turn and not self.traced and not is_part

    def as_json(self) -> dict[str, Any]:
        """Only the facts that differ from their defaults."""
        usual = RunFacts()
        return {name: value for name, value in asdict(self).items() if getattr(self, name) != getattr(usual, name)}

    @classmethod
    def of_json(cls, value: object) -> RunFacts:
        """The facts in what `as_json` returned; raises ValueError for anything else."""
        facts = typed(cls, value, "facts")
        if facts.pending_limit is not None and not 1 <= facts.pending_limit <= _LARGEST_QUEUE:
            raise ValueError(f"facts.pending_limit is {facts.pending_limit}")
        if facts.pinned_bandwidth is not None and not _SLOWEST_LINK <= facts.pinned_bandwidth <= _FASTEST_LINK:
            raise ValueError(f"facts.pinned_bandwidth is {facts.pinned_bandwidth}")
        return facts


@dataclass(frozen=True)
class CutShort:
    """What ended a run early. Its last iteration is incomplete, and its last line raised."""

    by: str  # the name of an exception, or of a signal
    place: str = ""  # the program's innermost line then: file:line
    within: tuple[str, ...] = ()  # the lines of the stack, and those of the loops around them
    rank: int = NONE  # which one of several ranks
    ended: int = 0  # when, by the system's clock, in ms

    @property
    def how(self) -> str:
        """`failed`, `interrupted` or `killed`."""
        if self.by == "KeyboardInterrupt":
            return "interrupted"
        return "killed" if self.by.startswith("SIG") else "failed"


@dataclass(frozen=True)
class WindowReason:
    """Why a window other than that of the first steps was recorded."""

    why: str  # LOOP: another loop; SCRIPT: no loop at all
    place: str = ""  # for a loop: its place
    since: int = 0  # for a script: when the window began, since the run did


@dataclass(frozen=True)
class Cluster:
    """A run of more ranks than are kept whole, with figures of each."""

    ranks: tuple[RankTimes, ...]
    step: int  # as recorded
    typical: int  # the median of what ranks would take by themselves
    stragglers: tuple[Straggler, ...] = ()
    world: int = 0  # how many ranks the run has


@dataclass(frozen=True)
class RankTimes:
    """One rank of many, per recorded step."""

    rank: int
    host: str
    own: int  # what it would take if it never waited for a peer
    computing: int  # the GPU's part of that
    waits: int  # within collectives, for the last rank
    behind: int  # its mean delay at collectives, after half of its peers
    last: float  # the share of its collectives at which it arrives last
    kind: int  # ranks of one kind take part in the same collectives


@dataclass(frozen=True)
class Straggler:
    """A rank, or most ranks of a host, that take longer than the others of their kind."""

    host: str
    ranks: tuple[int, ...]
    late: int  # per step
    computing: bool  # whether the GPU takes longer, else the host
    left: int  # the step once this straggler and all before it are like the others


@dataclass(frozen=True)
class Course:
    """Steps over the course of the run, a row for each `each` of them."""

    each: int = 1
    step: tuple[int, ...] = ()  # the median
    longest: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()  # the median, NONE if unknown
    ended: tuple[int, ...] = ()  # when the last of them ended, on the host's clock


@dataclass(frozen=True)
class PlainRun:
    """What marks alone show of a rank's whole run, most of which was not recorded closely."""

    marked_by: str  # "step", "optimizer", "forward" or "graph"; "nobody" if no step was announced
    steps: int  # plain ones, without those of the warm-up
    step: int  # the duration without stalls
    low: int  # nine in ten take longer
    high: int  # one in ten takes longer
    warm_up: int = 0  # steps at the beginning that are unlike the others
    warm_up_time: int = 0
    host: int = NONE  # a step of the host if nothing holds it up, if the host does not set the pace
    lead: int = NONE  # the host's typical lead at the end of a step
    no_lead: float = 0.0  # the share of steps at whose end the host had none
    input: int = 0  # how long a step waits for its input
    collector: int = 0  # how long the garbage collector runs in a step
    requests: float = 0.0  # requests for memory from the driver per step, after the warm-up
    retries: int = 0  # allocations that found the memory full, after the warm-up
    delayed: float = 0.0  # the share of the run in which the program's thread was ready and had no processor
    course: Course = Course()
    fault: str = ""  # why marks ended before the run did


@dataclass(frozen=True)
class Part:
    """A node in the run's tree: a loop, or a line beside its loops, and what it contains.

    A loop's parts are the loops within it; its lines are what its iterations do besides. The root's parts and lines sum
    to the run.
    """

    kind: str
    place: str = ""  # file:line
    source: str = ""  # the line's text
    function: str = ""
    began: int = 0  # since the run's first moment
    time: int = 0
    busy: int = NONE  # how long the GPU worked in that time
    turns: int = 0  # its iterations; 0 if they were not counted
    passes: int = NONE  # the iterations of the enclosing loop in which it ran; NONE if unknown
    at_least: bool = False  # iterations before the loop was noticed, or beyond the counted ones, are missing
    turn: int = NONE  # the mean iteration
    low: int = NONE  # of ten iterations, the second fastest and the second slowest
    high: int = NONE
    warm_up: int = 0  # iterations at the beginning that are unlike those that follow
    warm_up_time: int = 0
    kinds: tuple[SlowIterations, ...] = ()  # the kind with the most time first
    lines: tuple[LineTime, ...] = ()  # the longest first
    parts: tuple[Part, ...] = ()  # in the order of the run
    clock: int = NONE  # root only: the run's first moment, on the clock that times its steps
    shares: tuple[int, ...] = ()  # root only: in equal parts of the run, the percentage of time in which the GPU worked
    decides: tuple[str, ...] = ()  # root only: lines whose values decide what the program does
    beside: tuple[LineTime, ...] = ()  # root only: how long other threads had a processor, by line
    ran: int = NONE  # root only: how long the run's own thread had one

    @property
    def named(self) -> str:
        return loop_name(self.place, self.function)

    def comes_rarely(self, enclosing: Part) -> bool:
        """Whether most iterations of the enclosing loop pass without it, as a trainer's evaluation."""
        return self.kind == LOOP and 0 <= 2 * self.passes < enclosing.turns

    @property
    def waits(self) -> int:
        return NONE if self.busy == NONE else max(0, self.time - self.busy)

    @property
    def usual(self) -> int:
        """The mean iteration after the warm-up, without slow iterations that follow no rule."""
        longer = self.warm_up_time + sum(slow.total for slow in self.kinds if not slow.regular)
        return NONE if self.turn == NONE else max(self.low, self.turn - longer // max(1, self.turns))

    def within(self) -> Iterator[Part]:
        """This part and all that it contains."""
        yield self
        for part in self.parts:
            yield from part.within()

    def loop_at(self, name: str) -> Part | None:
        """The loop of this name. If only its line is given, a trainer may have several loops there: of those that take
        at least half as long as the longest, the one with the most iterations."""
        loops = [part for part in self.within() if part.kind == LOOP]
        named = [part for part in loops if part.named == name] or [part for part in loops if part.place == name]
        longest = max((part.time for part in named), default=0)
        return max((part for part in named if 2 * part.time >= longest), key=lambda part: part.turns, default=None)


def loop_name(place: str, function: str) -> str:
    """A loop's name in reports. A line of the program may call several loops of a library."""
    return f"{place} ({function})" if ":" in function else place


def place_of_loop(name: str) -> str:
    """The program's own line in the name of a loop: file:line."""
    return name.partition(" (")[0]


@dataclass(frozen=True)
class LineTime:
    """A line of the program, how long the host was there, and how long the GPU was idle meanwhile."""

    place: str  # file:line
    time: int
    idle: int = NONE
    call: str = ""  # the function of a library that the line called
    within: str = ""  # the program's own line that this call mostly was at: file:line


@dataclass(frozen=True)
class SlowIterations:
    """A kind of iteration that takes far longer than the others: how often, how much longer, and at which line."""

    count: int
    every: float
    regular: bool
    longer: int  # typically
    total: int  # of all of them
    place: str = ""


@dataclass(frozen=True)
class UnevenLoop:
    """An outermost loop that takes one rank longer than the rest."""

    place: str  # file:line
    rank: int  # the rank that it takes longest
    turns: int  # its iterations on that rank
    longest: int
    mean: int  # of all ranks


@dataclass(frozen=True)
class LoaderUse:
    """A loader as the run used it: its settings, how long batches took, how long the program waited for them."""

    place: str  # where the program creates it, file:line
    workers: int
    prefetch: int  # batches that each worker prepares ahead
    batches: int
    waited: int  # how long the program waited for its batches
    began: int = 0  # the part of that for the first batch of each pass, when workers start
    in_worker: int = NONE  # how long a worker prepares one batch, or the program itself if there are none
    looped: int = 0  # from the first batch of each pass to its last one
    cores: int = 0
    rank: int = 0
    passes: int = 1
    turns: tuple[int, ...] = ()  # the program's time besides waiting: the mean of every `each` iterations of its loop
    each: int = 1
    busy: int = NONE  # workers that prepared any batch; NONE if unknown

    @property
    def idle(self) -> int:
        """Workers that prepared nothing."""
        return max(0, self.workers - self.busy) if self.busy > 0 else 0

    @property
    def iteration(self) -> float:
        """The typical iteration of its loop without waiting for the batch."""
        return max(1.0, float(median(self.turns))) if self.turns else self._mean

    @property
    def _mean(self) -> float:
        return max(1.0, (self.looped - (self.waited - self.began)) / max(1, self.batches))

    def enough(self, shorter: float = 0.0, least: float = 1.0) -> int:
        """The number of workers, up to that of cores, with which the run waits least, if each iteration is that much
        `shorter`, but not less than `least`. Starting workers counts as waiting."""
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
        """Nanoseconds from one batch to the next, however soon the program needs it."""
        return self.in_worker / workers if self.in_worker != NONE and workers else 0.0

    def starting(self, workers: int) -> int:
        """How long it takes to start so many workers in each pass, whose first batch waits for that."""
        first = self.began - self.passes * max(0, self.in_worker)
        return round(max(0, first) / self.workers * workers) if self.workers else 0

    def saved_with(self, workers: int, least: int) -> int:
        """How much less the run waits with so many workers, if no iteration is shorter than `least`."""
        saved = self.waited - self.began - self.waits_with(workers) - self.starting(workers - self.workers)
        return min(saved, self.looped - self.batches * least)

    def waits_with(self, workers: int, shorter: float = 0.0, least: float = 1.0) -> int:
        """How long the program would wait for batches, without the first of each pass.

        Each worker prepares its batches one after the other, and gets the next task when the program takes a batch. A
        long iteration only fills the queue, so iterations are simulated one by one.
        """
        if self.in_worker == NONE or not workers:
            return self.waited - self.began
        a_pass = -(-self.batches // max(1, self.passes))
        repeats = min(self.each, max(1, SIMULATED_ITERATIONS // max(1, len(self.turns))))
        usual = self.turns or [self._mean] * min(self.batches, SIMULATED_ITERATIONS)
        durations = [max(least, duration - shorter) for duration in usual for _ in range(repeats)]
        ahead, waited = workers * max(1, self.prefetch or USUAL_PREFETCH), 0.0
        for first in range(0, len(durations), a_pass):
            waited += _waited(durations[first : first + a_pass], self.in_worker, workers, ahead)
        return round(waited * self.batches / max(1, len(durations)))


def _waited(durations: list[float], prepares: float, workers: int, ahead: int) -> float:
    """The waits of one pass, from its second batch on."""
    free, fetched, now, waited = [0.0] * workers, list[float](), 0.0, 0.0
    for number, duration in enumerate(durations):
        sent = fetched[number - ahead] if number >= ahead else 0.0
        ready = free[number % workers] = max(sent, free[number % workers]) + prepares
        waited += max(0.0, ready - now) if number else 0.0
        now = max(now, ready)
        fetched.append(now)
        now += duration
    return waited
