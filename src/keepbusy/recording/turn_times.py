"""How long turns take: what is usual, the warm-up, and kinds of turn that take far longer than the others.

Nothing here looks for a pattern. Turns that stick out are brought together by the pause that made them long, or by the
line at which looks at the program found it for longer than in an ordinary turn. How often each kind comes, and whether
it keeps a beat, is read off afterwards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keepbusy.recording.interruptions import CHECKPOINT, COLLECTOR, INPUT, AllocatorReading
from keepbusy.timeline.model import NONE, Ints, Mask
from keepbusy.timeline.plain_run import Course, PlainRun, RareStall

# What is usual among turns, and from which length on one is slow.

SLOW_DEVIATIONS, SLOW_SHARE = 8.0, 0.5
"""A turn is slow when it takes longer than the median by so many usual deviations, and by so much of the median."""
COMPARED_TURNS = 256
"""Turns may change over a run, so what is usual is asked of so many at a time."""
STEADY_DRIFT = 0.15
"""Between the first half and the second of turns that are called steady."""


def slow_from(took: Ints) -> int:
    """A turn that takes longer than this is slow."""
    return int(_slow_from(took[None])[0, 0])


def _slow_from(rows: Ints) -> npt.NDArray[np.float64]:
    median = np.median(rows, axis=1, keepdims=True)
    deviation = np.median(np.abs(rows - median), axis=1, keepdims=True)
    return np.asarray(median + np.maximum(SLOW_DEVIATIONS * deviation, SLOW_SHARE * median))


def slow_turns(took: Ints) -> tuple[Mask, Ints]:
    """Which turns are slow, and what usual ones near each take."""
    found, usual = np.zeros(len(took), bool), np.zeros(len(took), np.int64)
    blocks = max(1, len(took) // COMPARED_TURNS)
    each = len(took) // blocks
    longer = len(took) - each * blocks  # so many blocks have one turn more
    for begin, count, length in ((0, longer, each + 1), (longer * (each + 1), blocks - longer, each)):
        part = slice(begin, begin + count * length)
        rows = took[part].reshape(count, length)
        if rows.size:
            found[part] = (rows > _slow_from(rows)).ravel()
            usual[part] = np.repeat(np.median(rows, axis=1), length)
    return found, usual


def warm_up(took: Ints) -> int:
    """How many turns at the beginning are not like those that follow: memory, tuning and compiling take their time."""
    if len(took) < 4:
        return 0
    half = took[len(took) // 2 :]
    usual = took <= min(slow_from(half), int(2 * np.median(half)))
    settled = np.flatnonzero(usual[:-2] & usual[1:-1] & usual[2:])
    if not len(settled):  # as where every third turn is slow: also later ones are no steadier
        settled = np.flatnonzero(usual)
    return int(min(settled[0], len(took) // 2)) if len(settled) else len(took) // 2


def steady(took: Ints) -> bool:
    """No slow turn among them, and no drift from the first half to the second."""
    half = len(took) // 2
    if half < 2 or (took > slow_from(took)).any():
        return False
    first, second = np.median(took[:half]), np.median(took[half:])
    return bool(abs(first - second) <= STEADY_DRIFT * max(first, second))


CHANGE, LASTING_TURNS, LASTING_TIME = 0.1, 128, 2_000_000_000
"""Turns have changed for good when so many of them, for so long, take so much more or less than at first."""
_STRETCH = 16


def changed_at(took: Ints, first: int) -> int | None:
    """Since which turn they take lastingly longer than at first, or less long; None where they are as they were."""
    passed = np.cumsum(took[::-1])
    lasting = max(LASTING_TURNS, int(np.searchsorted(passed, LASTING_TIME)) + 1)
    if len(took) < lasting:
        return None
    halves = [differs(half, first) for half in np.array_split(took[-lasting:], 2)]
    if not halves[0] or halves[0] != halves[1]:
        return None
    rows = np.arange(len(took) % _STRETCH, len(took), _STRETCH)
    alike = [row for row in rows.tolist() if differs(took[row : row + _STRETCH], first) != halves[0]]
    return min(len(took) - lasting // 2, alike[-1] + _STRETCH) if alike else 0


def differs(took: Ints, first: int) -> int:
    """1 where turns take longer than at first, -1 where they take less long, 0 where they are as they were."""
    ratio = float(np.median(took)) / max(1, first)
    return int(ratio > 1 + CHANGE) - int(ratio < 1 / (1 + CHANGE))


# After how many turns something comes again, and how surely.

BEAT_TOLERANCE, BEAT_SHARE = 0.1, 0.75
"""Most of the distances differ by no more than this share of the usual one."""
BEAT_LASTS = 0.25
"""Of the turns from the first one on, a beat goes on for so many at least: else it was but a burst."""
FORESEEN_FROM, SKIPPED_BEATS = 4, 3
"""What is foreseen comes every fourth turn or less often, and two times in a row it may have come unnoticed."""


class Beat(NamedTuple):
    """Turns from one to the next, typically; whether nearly always so many, and whether so exactly that the next one is
    foreseen."""

    every: float = 0.0
    regular: bool = False
    punctual: bool = False


def beat_of(came: Ints, known: Ints) -> Beat:
    """Of turns by their numbers, sorted. Where not all between two are known, another may have come."""
    if len(came) < 2:
        return Beat()
    distances = np.diff(came)
    whole = np.diff(np.searchsorted(known, came)) == distances
    every = float(np.median(distances[whole] if whole.any() else distances))
    off = np.abs((distances[whole] if whole.any() else distances) - every)
    throughout = came[-1] - came[0] + every >= BEAT_LASTS * (known[-1] - came[0])
    mostly = (off <= max(1.0, BEAT_TOLERANCE * every)).mean() >= BEAT_SHARE and distances.mean() <= 2 * every
    punctual = bool(throughout and _is_punctual(distances, every))
    return Beat(every, punctual or bool(mostly and throughout), punctual)


def _is_punctual(distances: Ints, every: float) -> bool:
    beats = np.maximum(1.0, np.round(distances / max(every, 1.0)))
    exact = np.abs(distances - beats * every) <= 1
    mostly = exact.mean() >= (1.0 if len(exact) < 8 else 0.9)
    return bool(every >= FORESEEN_FROM and mostly and beats.max() <= SKIPPED_BEATS and np.median(beats) < 2)


# Kinds of slow turn.

REASON_SHARE = 0.5
"""A pause that makes up so much of what a turn is longer is its reason."""
ALIKE_LENGTHS = 3.0
"""Slow turns that no look has met go to the kind whose turns are as long as they are, within so many times."""


@dataclass(frozen=True, eq=False)
class LookTable:
    """Looks at the program, a row each: when, for how long it counts, and a number for where the program stood."""

    times: Ints
    weight: Ints
    place: Ints

    @classmethod
    def of_nothing(cls) -> LookTable:
        return cls(*(np.zeros(0, np.int64) for _ in range(3)))


@dataclass(frozen=True, eq=False)
class SlowKind:
    """Slow turns that are alike: their rows, how much longer each took, a reason, and a place; NONE where unknown."""

    rows: Ints
    longer: Ints
    reason: str
    place: int

    @property
    def total(self) -> int:
        return int(self.longer.sum())


def slow_kinds(
    took: Ints, began: Ints, over: Ints, looks: LookTable, pauses: Mapping[str, Ints] | None = None
) -> list[SlowKind]:
    """The largest first. `began` and `over`: when each turn did, by the looks' clock; `pauses`: what held it up."""
    slow, usual = slow_turns(took)
    rows = np.flatnonzero(slow)
    longer = took[rows] - usual[rows]
    place = _longest_at(slow, began, over, looks)
    reasons = [""] * len(rows)
    for name, times in (pauses or {}).items():
        for one in np.flatnonzero(times[rows] >= REASON_SHARE * longer).tolist():
            reasons[one] = name
            if name == COLLECTOR:
                place[one] = NONE  # it comes wherever memory is asked for
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for one, reason in enumerate(reasons):
        groups[reason, int(place[one])].append(one)
    _join_those_without_reason(groups)
    _give_away_unseen(groups, longer)
    kinds = [SlowKind(rows[sorted(ones)], longer[sorted(ones)], *key) for key, ones in groups.items()]
    return sorted(kinds, key=lambda kind: -kind.total)


def _longest_at(slow: Mask, began: Ints, over: Ints, looks: LookTable) -> Ints:
    """Of each slow turn, the place at which it was longest beyond an ordinary turn; NONE where no look has met it."""
    place = np.full(int(slow.sum()), NONE, np.int64)
    if not len(place) or not len(looks.times):
        return place
    turn = np.searchsorted(over, looks.times)
    inside = turn < len(over)
    inside[inside] &= looks.times[inside] >= began[turn[inside]]
    turn, weight, where = turn[inside], looks.weight[inside], looks.place[inside]
    places, where = np.unique(where, return_inverse=True)
    ordinary = ~slow[turn]
    usual = np.bincount(where[ordinary], weight[ordinary], len(places)) / max(1, int((~slow).sum()))
    spent = np.zeros((len(place), len(places)))
    number = np.cumsum(slow) - 1
    np.add.at(spent, (number[turn[~ordinary]], where[~ordinary]), weight[~ordinary])
    met = spent.any(axis=1)
    place[met] = places[np.argmax(spent[met] - usual, axis=1)]
    return place


def _join_those_without_reason(groups: defaultdict[tuple[str, int], list[int]]) -> None:
    """As where two kinds meet in one turn, and the pause makes up the smaller part of it."""
    for reason, place in [key for key in groups if not key[0] and key[1] != NONE]:
        others = [key for key in groups if key[0] and key[1] == place]
        if len(others) == 1:
            groups[others[0]] += groups.pop((reason, place))


def _give_away_unseen(groups: defaultdict[tuple[str, int], list[int]], longer: Ints) -> None:
    """Turns that no look has met, to the kind with the same reason whose turns are most nearly as long."""
    for reason, place in [key for key in groups if key[1] == NONE]:
        others = {
            key: float(np.median(longer[ones])) for key, ones in groups.items() if key[0] == reason and key[1] >= 0
        }
        for one in groups[reason, place] if others else ():
            key = min(others, key=lambda other: abs(np.log(longer[one] / others[other])))
            if 1 / ALIKE_LENGTHS <= longer[one] / others[key] <= ALIKE_LENGTHS:
                groups[key].append(one)
                groups[reason, place] = [left for left in groups[reason, place] if left != one]
        if not groups[reason, place]:
            del groups[reason, place]


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
        return StepLooks(self.times[inside], self.weight[inside], self.chain[inside], self.chains, self.library)

    @property
    def weights(self) -> dict[int, int]:
        """Of each chain that was met, how long."""
        total = np.bincount(self.chain, self.weight, len(self.chains))
        return {number: round(float(total[number])) for number in np.flatnonzero(total).tolist()}

    def trunk(self) -> Chain:
        """Where the program mostly is: through these lines runs its loop."""
        return agreed({self.chains[number]: weight for number, weight in self.weights.items()})


AGREEMENT = 0.6
"""Of the time so much must have been seen at a line for that to be the place."""


def agreed(weights: Mapping[Chain, int], trunk: Chain = ()) -> Chain:
    """The longest beginning that most of the time was in. While it is still the loop itself, whichever line had most.

    A function that is called from the loop works at many lines, and the call is its place. The loop is no such place.
    """
    least = AGREEMENT * sum(weights.values())
    found: Chain = ()
    while True:
        longer: Counter[Chain] = Counter()
        for chain, weight in weights.items():
            if len(chain) > len(found) and chain[: len(found)] == found:
                longer[chain[: len(found) + 1]] += weight
        best, weight = max(longer.items(), key=lambda one: one[1], default=(found, 0))
        inside = len(found) < len(trunk) and found == trunk[: len(found)]
        if not weight or (weight < least and not inside):
            return found
        found = best


def branch(chain: Chain, trunk: Chain) -> Chain:
    """As far as the line at which it leaves the trunk."""
    return chain[: shared(chain, trunk) + 1]


def shared(chain: Chain, trunk: Chain) -> int:
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
    low, high = np.percentile(ordinary.took, [10, 90]) if len(ordinary) else (0, 0)
    lead = ordinary.lead[ordinary.lead != NONE]
    later = [one for one in readings if len(rest) and one.mark >= rest.mark[0]]
    return PlainRun(
        marked_by=marked_by,
        steps=len(rest),
        step=mean(ordinary.took),
        low=round(low),
        high=round(high),
        warm_up=begun,
        warm_up_time=int(plain.took[:begun].sum()),
        host=_host_alone(ordinary),
        lead=_median(lead),
        no_lead=float((lead < NO_LEAD).mean()) if len(lead) else 0.0,
        input=mean(ordinary.input),
        collector=mean(ordinary.collector),
        requests=_a_step(later, lambda one: one.requests),
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
    trunk = looks.within(began[~slow], over[~slow]).trunk()
    branches: dict[Chain, int] = {trunk: NONE}
    for chain in looks.chains:  # the loop itself is no place
        branches.setdefault(branch(chain, trunk), len(branches) if chain != trunk[: len(chain)] else NONE)
    of_chain = np.array([branches[branch(chain, trunk)] for chain in looks.chains], np.int64)
    place = of_chain[looks.chain] if len(looks.chain) else looks.chain
    pauses = {
        INPUT: steps.input,
        COLLECTOR: steps.collector,
        CHECKPOINT: np.array([saves.get(mark, 0) for mark in steps.mark.tolist()], np.int64),
    }
    kinds = slow_kinds(steps.took, began, over, LookTable(looks.times, looks.weight, place), pauses)
    whole = max(1, int(steps.took.sum()))
    found = [_stall(kind, steps, looks, trunk, whole) for kind in kinds]
    return [one for one in found if _is_worth_a_line(one, delayed)]


def _stall(kind: SlowKind, steps: Steps, looks: StepLooks, trunk: Chain, whole: int) -> RareStall:
    came = steps.mark[kind.rows]
    beat = beat_of(came, steps.mark)
    lines, library = _place_of(kind, steps, looks, trunk)
    return RareStall(
        what=kind.reason,
        count=len(came),
        every=beat.every,
        regular=beat.regular,
        time=round(float(np.median(kind.longer))),
        total=kind.total,
        share=kind.total / whole,
        lines=lines,
        library=library,
        loop=min(shared(lines, trunk), len(trunk) - 1, len(lines) - 1),
        last=int(came[-1]) + 1,
        punctual=beat.punctual,
    )


def _place_of(kind: SlowKind, steps: Steps, looks: StepLooks, trunk: Chain) -> tuple[Chain, str]:
    """Where most of the looks into these steps agree that the program was, and what it called in a library there."""
    over = steps.ended[kind.rows]
    weights = looks.within(over - steps.host[kind.rows], over).weights
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


def _median(values: Ints) -> int:
    return round(float(np.median(values))) if len(values) else NONE


def _host_alone(steps: Steps) -> int:
    """What a step takes of a host that nothing holds up; NONE where the host may well set the pace."""
    known = steps.lead != NONE
    if not known.any() or np.median(steps.lead[known]) < LEAD_FROM * np.median(steps.took):
        return NONE
    return _median(steps.host[steps.host < (1 - HELD_UP_FROM) * steps.took])


def _a_step(readings: Sequence[AllocatorReading], counted: Callable[[AllocatorReading], int]) -> float:
    if len(readings) < 2:
        return 0.0
    first, last = readings[0], readings[-1]
    return (counted(last) - counted(first)) / max(1, last.mark - first.mark)


def _course(steps: Steps) -> Course:
    each = max(1, -(-len(steps) // COURSE_ROWS))
    parts = [np.arange(first, min(first + each, len(steps))) for first in range(0, len(steps), each)]
    return Course(
        each=each,
        step=tuple(_median(steps.took[part]) for part in parts),
        longest=tuple(int(steps.took[part].max()) for part in parts),
        lead=tuple(_median(steps.lead[part][steps.lead[part] != NONE]) for part in parts),
        ended=tuple(int(steps.ended[part[-1]]) for part in parts),
    )
