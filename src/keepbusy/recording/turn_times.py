"""A plain run: what a step usually takes, since when steps have changed for good, and what stalls them rarely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from keepbusy.instrument.lines import LIBRARY, PYTHON, TORCH
from keepbusy.instrument.loop_tree import agreed
from keepbusy.instrument.loops import Line, Looks
from keepbusy.instrument.slow_turns import LookTable, SlowKind, beat_of, quantile, slow_kinds, slow_turns, warm_up
from keepbusy.recording.run_counters import CHECKPOINT, COLLECTOR, INPUT, AllocatorReading
from keepbusy.timeline.frame_roles import source_line
from keepbusy.timeline.model import NONE, Ints, Mask
from keepbusy.timeline.run_facts import Course, PlainRun, RareStall

CHANGE, LASTING_TIME = 0.1, 2_000_000_000
"""Turns have changed for good when all of them take so much more or less than at first for so long."""
_STRETCH = 16
TRIMMED, CERTAINTY = 0.1, 3.0
_QUARTERS = 4


def trimmed(took: Ints) -> Ints:
    """Without the shortest and the longest. Turns may well differ by turns, so the one in the middle tells little."""
    ends = int(TRIMMED * len(took))
    return np.sort(took)[ends : len(took) - ends]


def changed_at(took: Ints, first: int) -> int | None:
    """Since which turn they take lastingly longer than at first, or less long; None where they are as they were."""
    passed = np.cumsum(took[::-1])
    lasting = max(_QUARTERS, int(np.searchsorted(passed, LASTING_TIME)) + 1)
    if len(took) < lasting:
        return None
    now = differs(took[-lasting:], first, CERTAINTY * (1 + 40 / lasting**2))  # as Student has it: of few, less is sure
    if not now or {differs(one, first) for one in np.array_split(took[-lasting:], _QUARTERS)} != {now}:
        return None  # no spell is in all quarters
    stretch = min(_STRETCH, lasting)
    rows = np.arange(len(took) % stretch, len(took), stretch)
    alike = [row for row in rows.tolist() if differs(took[row : row + stretch], first) != now]
    return min(len(took) - lasting // 2, alike[-1] + stretch) if alike else 0


def differs(took: Ints, first: int, certainty: float = CERTAINTY) -> int:
    """1 where turns take longer than at first, -1 where they take less long, 0 where they are as they were, or differ
    among themselves so much that nobody can tell."""
    usual = trimmed(took)
    ratio, error = mean(usual) / max(1, first), certainty * usual.std() / len(usual) ** 0.5 / max(1, first)
    return int(ratio - error > 1 and ratio > 1 + CHANGE) - int(ratio + error < 1 and ratio < 1 / (1 + CHANGE))


# Steps, and the plain run that they tell of.


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a run, a row each; it ends with the mark of that number.

    A step takes what passes between its marks on the device, for there a host that is ahead loses nothing by a pause;
    where the device's marks are not known, it takes what passes on the host. The two are never mixed: while
    the device's queue fills, the host's steps are much too short.
    """

    mark: Ints
    took: Ints
    plain: Mask  # else somebody looked closely
    input: Ints
    collector: Ints
    lead: Ints  # at its end, NONE where nobody knows
    host: Ints  # what passes between its marks on the host
    ended: Ints  # when, by the host's clock

    def __len__(self) -> int:
        return len(self.mark)

    def take(self, rows: Ints | Mask) -> Steps:
        return Steps(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


Chain = tuple[str, ...]
"""Lines of the program from the outside in, as in `train.py(41): main`."""


@dataclass(frozen=True, eq=False)
class StepLooks:
    """Looks by the chain of the program's lines at which they found it."""

    times: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    weight: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    chain: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    chains: Sequence[Chain] = ()
    library: Sequence[str] = ()  # of each chain, the library's line that its last one called

    def within(self, began: Ints, over: Ints) -> StepLooks:
        """Those that fall into these stretches of time, which are in order."""
        turn = np.searchsorted(over, self.times)
        inside = turn < len(over)
        inside[inside] &= self.times[inside] >= began[turn[inside]]
        times = self.times[inside]
        weight = np.minimum(self.weight[inside], over[turn[inside]] - times)
        return StepLooks(times, weight, self.chain[inside], self.chains, self.library)

    @property
    def weights(self) -> dict[int, int]:
        """Of each chain that was met, how long."""
        total = np.bincount(self.chain, self.weight, len(self.chains))
        return {number: round(float(total[number])) for number in np.flatnonzero(total).tolist()}

    def trunk(self, part: Callable[[Chain], Chain] = tuple) -> Chain:
        """Where the program mostly is, by this part of its chains: through these lines runs its loop."""
        weights: Counter[Chain] = Counter()
        for number, weight in self.weights.items():
            weights[part(self.chains[number])] += weight
        return agreed(weights)


def step_looks(looks: Looks) -> StepLooks:
    """Looks by the user's lines. Whoever asks for them knows when steps began and ended."""
    count = len(looks.known_chains)
    times = np.array(looks.times, np.int64)
    weight = np.diff(times, append=max(looks.ended, *times[-1:], looks.began)) if len(times) else times
    chain = np.minimum(np.array(looks.chains, np.int64), count - 1)  # the program goes on meanwhile
    known = [_written_chain(looks, lines) for lines in looks.known_chains[:count]]
    return StepLooks(times, weight, chain[: len(times)], [chain for chain, _ in known], [inside for _, inside in known])


def _written_chain(looks: Looks, lines: Sequence[Line]) -> tuple[tuple[str, ...], str]:
    """The user's lines, and the library's that the last of them called."""

    def written(line: Line) -> str:
        return f"{looks.file(line.code)}({line.line}): {looks.codes[line.code].co_name}"

    users = [line for line in lines if looks.is_users(line)]
    called = lines[-1] if lines and looks.kinds[lines[-1].code] in (LIBRARY, TORCH, PYTHON) else None
    return tuple(written(line) for line in users), written(called) if called and users else ""


def _branch(chain: Chain, trunk: Chain) -> Chain:
    """As far as the line at which it leaves the trunk."""
    return chain[: _shared_depth(chain, trunk) + 1]


def _functions(chain: Chain) -> Chain:
    """Without the lines: a loop that is busy at many of its own is at none of them for most of the time."""
    known = ((line, source_line(line)) for line in chain)
    return tuple(f"{one[0]}: {one[2]}" if one else line for line, one in known)


def _shared_depth(chain: Chain, trunk: Chain) -> int:
    """How many lines the two have in common from the outside in."""
    return next((depth for depth, (one, other) in enumerate(zip(chain, trunk, strict=False)) if one != other),
                min(len(chain), len(trunk)))  # fmt: skip


STALL_MATTERS, WHIM_MATTERS = 0.005, 0.03
"""Of the run: what takes less is not worth a line. What keeps no beat and has no reason may be the machine's whim."""
NO_LEAD = 100_000
"""Below this the host has no lead: a mark takes some microseconds to reach the device, and clocks align no better."""
COURSE_ROWS = 512
LEAD_FROM, HELD_UP_FROM = 0.5, 0.25
"""A host that is usually half a step ahead does not set the pace. In a step in which it gains a quarter of it on the
device nothing holds it up: that is how the queue fills, at first and after each sync."""


def plain_run(
    steps: Steps,
    marked_by: str,
    saves: Mapping[int, int] | None = None,
    looks: StepLooks | None = None,
    readings: Sequence[AllocatorReading] = (),
    delayed: float = 0.0,
    fault: str = "",
) -> PlainRun:
    """What a step usually takes, what comes only now and then, and how the run went. `saves`: what checkpoints took, by
    the mark that ends the step."""
    plain = steps.take(steps.plain)
    begun = warm_up(plain.took)
    rest = plain.take(np.arange(len(plain)) >= begun)
    slow, _ = slow_turns(rest.took)
    ordinary = rest.take(~slow)
    lead = ordinary.lead[ordinary.lead != NONE]
    later = [one for one in readings if len(rest) and one.mark >= rest.mark[0]]
    return PlainRun(
        marked_by=marked_by,
        steps=len(rest),
        step=mean(ordinary.took),
        low=_quantile(ordinary.took, 0.1, unknown=0),
        high=_quantile(ordinary.took, 0.9, unknown=0),
        warm_up=begun,
        warm_up_time=int(plain.took[:begun].sum()),
        host=_host_alone(ordinary),
        lead=_quantile(lead),
        no_lead=float((lead < NO_LEAD).mean()) if len(lead) else 0.0,
        input=mean(ordinary.input),
        collector=mean(ordinary.collector),
        requests=(later[-1].requests - later[0].requests) / max(1, later[-1].mark - later[0].mark) if later else 0.0,
        retries=later[-1].retries - later[0].retries if later else 0,
        delayed=delayed,
        stalls=tuple(rare_stalls(rest, saves or {}, looks or StepLooks(), delayed)),
        course=_course(plain),
        fault=fault,
    )


def rare_stalls(steps: Steps, saves: Mapping[int, int], looks: StepLooks, delayed: float = 0.0) -> list[RareStall]:
    """Kinds of step that take far longer than the others, the largest share of the run first."""
    began, over = steps.ended - steps.host, steps.ended
    slow, _ = slow_turns(steps.took)
    if not slow.any():
        return []
    usual = looks.within(began[~slow], over[~slow])
    trunk, around = usual.trunk(), usual.trunk(_functions)
    branches: dict[Chain, int] = {trunk: NONE}
    for chain in looks.chains:  # the loop itself is no place
        branches.setdefault(_branch(chain, trunk), len(branches) if chain != trunk[: len(chain)] else NONE)
    of_chain = np.array([branches[_branch(chain, trunk)] for chain in looks.chains], np.int64)
    place = of_chain[looks.chain] if len(looks.chain) else looks.chain
    pauses = {
        INPUT: steps.input,
        COLLECTOR: steps.collector,
        CHECKPOINT: np.array([saves.get(mark, 0) for mark in steps.mark.tolist()], np.int64),
    }
    kinds = slow_kinds(
        steps.took,
        began,
        over,
        LookTable(looks.times, looks.weight, place),
        pauses,
        COLLECTOR,  # which comes wherever memory is asked for
    )
    whole = max(1, int(steps.took.sum()))
    found = [_stall(kind, steps, looks, of_chain, trunk, around, whole) for kind in kinds]
    return [one for one in found if _is_worth_a_line(one, delayed)]


def _stall(
    kind: SlowKind, steps: Steps, looks: StepLooks, of_chain: Ints, trunk: Chain, around: Chain, whole: int
) -> RareStall:
    """`of_chain`: the place of each chain. `around`: the functions that are open in an ordinary step, of which the last
    that is open here holds the loop."""
    came = steps.mark[kind.rows]
    beat = beat_of(came, steps.mark)
    lines, library = _place_of(kind, steps, looks, of_chain, trunk)
    return RareStall(
        what=kind.reason,
        count=len(came),
        every=beat.every,
        regular=beat.regular,
        time=_quantile(kind.longer),
        total=kind.total,
        share=kind.total / whole,
        lines=lines,
        library=library,
        loop=min(_shared_depth(lines, trunk), _shared_depth(_functions(lines), around) - 1, len(lines) - 1),
        last=int(came[-1]) + 1,
    )


def _place_of(kind: SlowKind, steps: Steps, looks: StepLooks, of_chain: Ints, trunk: Chain) -> tuple[Chain, str]:
    """Where most of the looks into these steps agree that the program was, and what it called in a library there.

    Of a kind with a place those alone that found it there: on a busy machine the rest of such a step takes long, too.
    """
    over = steps.ended[kind.rows]
    met = looks.within(over - steps.host[kind.rows], over).weights
    weights = {chain: weight for chain, weight in met.items() if kind.place in (NONE, of_chain[chain])}
    lines = agreed({looks.chains[number]: weight for number, weight in weights.items()}, trunk)
    if lines == trunk[: len(lines)]:
        return (), ""
    inside: Counter[str] = Counter()
    for number, weight in weights.items():
        if looks.chains[number] == lines:
            inside[looks.library[number]] += weight
    return lines, max(inside, key=lambda name: inside[name], default="")


def _is_worth_a_line(stall: RareStall, delayed: float) -> bool:
    """What keeps no beat and has no reason may as well be the processor that others took."""
    own = bool(stall.what) or stall.regular
    return stall.share >= (STALL_MATTERS if own else WHIM_MATTERS) and (own or stall.share > delayed)


def plain_step(steps: Steps) -> int | None:
    """What a stopwatch over many plain steps shows, the warm-up and slow ones left out; None if there are too few."""
    rest = steps.take(np.flatnonzero(steps.plain))
    took = rest.took[warm_up(rest.took) :]
    return mean(took[~slow_turns(took)[0]]) if len(took) >= 3 else None


def mean(took: Ints) -> int:
    return round(float(took.mean())) if len(took) else 0


def _quantile(values: Ints, share: float = 0.5, unknown: int = NONE) -> int:
    return round(float(quantile(values, share))) if len(values) else unknown


def _host_alone(steps: Steps) -> int:
    """What a step takes of a host that nothing holds up; NONE where the host may well set the pace."""
    known = steps.lead != NONE
    if not known.any() or quantile(steps.lead[known]) < LEAD_FROM * quantile(steps.took):
        return NONE
    return _quantile(steps.host[steps.host < (1 - HELD_UP_FROM) * steps.took])


def _course(steps: Steps) -> Course:
    each = max(1, -(-len(steps) // COURSE_ROWS))
    parts = [np.arange(first, min(first + each, len(steps))) for first in range(0, len(steps), each)]
    return Course(
        each=each,
        step=tuple(_quantile(steps.took[part]) for part in parts),
        longest=tuple(int(steps.took[part].max()) for part in parts),
        lead=tuple(_quantile(steps.lead[part][steps.lead[part] != NONE]) for part in parts),
        ended=tuple(int(steps.ended[part[-1]]) for part in parts),
    )
