"""What is known of a run as a whole, beside its spans: where it ran, what was recorded of it and what was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from keepbusy.timeline.files import typed
from keepbusy.timeline.plain_run import PlainRun, RareStall
from keepbusy.timeline.run_tree import LoaderUse, Part, UnevenLoop

STALL, DRIFT, SCRIPT = "stall", "drift", "script"
"""Beside LOOP: why a further window was opened."""
SLOWEST_LINK, FASTEST_LINK = 0.001, 1e6
"""Bytes a nanosecond between which any link between host and device lies."""
LARGEST_QUEUE = 1 << 20
"""No stream is known to take a thousandth part of so many commands before a launch blocks."""


@dataclass(frozen=True)
class WindowReason:
    """Why a window was recorded that is not that of the first steps."""

    why: str  # STALL: one was foreseen; DRIFT: steps have changed for good; LOOP: another loop; SCRIPT: no loop at all
    step: int | None = None  # of a stall: in which it was foreseen
    stall: RareStall | None = None
    began: int | None = None  # of a drift: since which step
    place: str = ""  # of a loop: where it stands
    since: int = 0  # of a script: how long the run had gone on when it began
    share: float | None = None  # of a drift: of the time of all steps, what has passed since
    number: int = 0  # of those that several ranks opened at the same turns


@dataclass(frozen=True)
class RankTimes:
    """One rank of many, a step of its recording. Nanoseconds."""

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
class Cluster:
    """A run of more ranks than are kept whole: what each one's trace told when it was read."""

    ranks: tuple[RankTimes, ...]
    step: int  # as recorded
    typical: int  # what half of the ranks would take by themselves, at most
    stragglers: tuple[Straggler, ...] = ()
    world: int = 0  # how many ranks the run has


@dataclass(frozen=True)
class RunFacts:
    """Of a run, or of one window of it. Times are nanoseconds."""

    source: str = ""  # the script or the trace, as the user named it
    sources: tuple[str, ...] = ()  # of ranks that came from several files
    device: str = ""
    pinned_bandwidth: float | None = None  # bytes a nanosecond that the device's link carries from pinned memory
    torch: str = ""
    world: int | None = None  # how many ranks the run has, where its traces say so
    groups: Mapping[int, int] = field(default_factory=dict)  # of each group of ranks: how many belong to it
    pending_limit: int | None = None  # commands that may be pending on a stream before a launch blocks
    virtual: bool = False
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
    left_out_steps: tuple[int, ...] = ()  # steps that stalled, and are explained elsewhere
    cluster: Cluster | None = None  # of which only some ranks are kept whole
    first_steps: int = 0  # of a virtual run, that are not like those that follow, and are no longer marked
    loop: str = ""  # the one whose turns are the steps, where the run's tree of loops tells: file:line
    beside: tuple[int, ...] = ()  # of each rank's marks, by number, those that begin no turn: what follows lies beside

    @property
    def named(self) -> str:
        """As a complaint calls what was recorded."""
        return self.source or "the recording"

    @property
    def runs_once(self) -> bool:
        """Whether it is a script that is one turn, and not the one turn of a loop, or one call, that was recorded."""
        is_part = (self.loop and not self.virtual) or any(run.steps for run in self.plain_runs.values())
        return self.one_turn and not self.traced and not is_part

    def as_json(self) -> dict[str, Any]:
        """Only what differs from what is assumed of every run."""
        usual = RunFacts()
        said = {one.name for one in fields(self) if getattr(self, one.name) != getattr(usual, one.name)}
        return {name: value for name, value in asdict(self).items() if name in said}

    @classmethod
    def of_json(cls, value: object) -> RunFacts:
        """What `as_json` gave; raises ValueError for anything else."""
        facts = typed(cls, value, "facts")
        if facts.pending_limit is not None and not 1 <= facts.pending_limit <= LARGEST_QUEUE:
            raise ValueError(f"facts.pending_limit is {facts.pending_limit}")
        if facts.pinned_bandwidth is not None and not SLOWEST_LINK <= facts.pinned_bandwidth <= FASTEST_LINK:
            raise ValueError(f"facts.pinned_bandwidth is {facts.pinned_bandwidth}")
        return facts
