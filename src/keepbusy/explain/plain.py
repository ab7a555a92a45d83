"""From the recorded run to the plain one: take out of the host what recording it cost.

Recording makes the host slower, in proportion to what was recorded there. How much one event
costs differs from machine to machine, so one factor is sought under which the unchanged run
replays to the plain step that the user measured. Device work is left as it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepbusy.causes.cause_inputs import by_workers
from keepbusy.causes.late_ranks import host_stretches
from keepbusy.timeline.figures import duration, option
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import INSTALLED, source_line
from keepbusy.timeline.model import NONE, Floats, Ints, Kind, Timeline
from keepbusy.timeline.replay import pace, replay
from keepbusy.timeline.run_facts import LOOP, SCRIPT, RunFacts

USUAL_COST = 1.0
"""The costs in traces/rank_timeline.py were measured, so one is the factor of a host like that one."""
LARGEST_COST = 8.0
"""No recorder was seen to cost more than this; what is missing then is a host that ran slower altogether."""
SLOWEST_HOST = 0.4
"""Nor was a host seen that had less than this share of its speed while it was recorded."""
TELLING_CHANGE = 0.03
"""A step that all of the recorder's cost changes by less than this share tells nothing of that cost."""
FACTOR_TOLERANCE = 0.002
"""Of the step: near enough, when the factor is sought."""
LUCKIEST_RECORDING = 2.0
"""A recording may catch a better moment of the machine, but not one twice as good."""
LONGEST_QUEUE = 64.0
"""So many times as long as it seemed a batch may take its workers, since they had prepared some before."""
LARGEST_STRETCH = 20.0
"""Of a line that a turn is at for longer than so many times what was recorded of it, too little was seen."""
UNREACHABLE = 0.75
"""A plain step below this share of what the device alone needs is not one of this run."""


@dataclass(frozen=True)
class PlainTimeline:
    """The run without its recorder, as far as we can tell."""

    timeline: Timeline
    step: int  # what the user measured, or what the recording shows
    ratio: float  # of that step to what the unchanged timeline replays to
    factor: float  # how strongly recording was taken out
    alike: float = 1.0  # how much of the plain step can be told from what was recorded, where that is a sample of it
    at_work: int = 0  # in such a step the GPU is at work for so long, as the run's tree has it
    unseen: int = 0  # of such a step, what passes at lines of which nothing was recorded


def deflate(timeline: Timeline, factor: float, speed: float = 1.0) -> Timeline:
    """Host work without a share of what recording cost. However strong the factor, work never becomes negative."""
    spans = timeline.spans
    work = spans.work.astype(np.float64)
    own = np.maximum(work, 1.0)
    host = ~timeline.on_device & (work > 0) & ~by_workers(timeline)
    result = np.where(host & (factor > 0), own / (1.0 + factor * spans.recording / own), work)
    result = np.where((spans.kind == Kind.RECORDING) & (factor > 0), 0, result)
    result = np.where(host & (speed < 1.0), result * speed, result)
    waits = _waits_for_absent_peers(timeline)
    if waits.any():
        slower = 1.0 + factor * spans.recording[host].sum() / own[host].sum() if host.any() else 1.0
        result -= waits * (1.0 - min(speed, 1.0) / slower)
    return timeline.change_spans(work=result.astype(np.int64))


def _waits_for_absent_peers(timeline: Timeline) -> Floats:
    """Of each collective whose ranks are not all here, what it takes beyond what its bytes need; of other rows 0.

    Those ranks were recorded, too, so what is waited for them is longer than in the plain run, as our own host work is.
    """
    spans, waits = timeline.spans, np.zeros(len(timeline))
    rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.work > 0))
    of_rank = np.unique(np.stack([spans.group[rows], timeline.rank_of_rows[rows]]), axis=1)
    groups, here = np.unique(of_rank[0], return_counts=True)
    members = np.array([timeline.facts.groups.get(group, 2) for group in groups.tolist()], np.int64)
    rows = rows[np.isin(spans.group[rows], groups[members > here])]
    if len(rows):
        size, work = spans.size[rows], spans.work[rows]
        needed = np.maximum(work.min(), size / max((size / work).max(), 1e-9))
        waits[rows] = np.maximum(work - needed, 0.0)
    return waits


def plain_run(timeline: Timeline, plain_step: int | None) -> PlainTimeline:
    """The timeline under which the unchanged run takes the plain step."""
    timeline = _as_long_as_met(timeline)
    if plain_step is not None and plain_step == turn_of_part(timeline):
        part = deflate(timeline, USUAL_COST)
        return _as_lines_took(_sampled(part, plain_step, USUAL_COST))
    if plain_step is not None:
        timeline = even_hosts(_with_ready_batches(timeline, plain_step))
    recorded = pace(timeline)
    if recorded < 1:
        damaged = "shows steps in which no time passes, so its times are damaged; record it again."
        raise BadInput(f"{timeline.facts.named} {damaged}")
    if plain_step is None:
        return PlainTimeline(timeline, round(recorded), 1.0, 0.0)
    if plain_step > LUCKIEST_RECORDING * recorded:
        raise BadInput(
            f"{timeline.facts.named} cannot have a plain step of {option(plain_step)} ms: recorded, its steps take "
            f"{duration(round(recorded))}, and recording makes no run faster; give --plain-step in milliseconds, "
            "measured on the same program."
        )
    factor, speed = _factor(timeline, plain_step, recorded), 1.0
    if factor == LARGEST_COST:
        speed = _sought(lambda speed: pace(deflate(timeline, LARGEST_COST, speed)), SLOWEST_HOST, 1.0, plain_step)
    factor, speed = _no_slower_than_marks(timeline, factor, speed)
    deflated = deflate(timeline, factor, speed)
    reached = max(1.0, pace(deflated))
    if plain_step < UNREACHABLE * reached:
        if plain_step == timeline.facts.plain_step:  # of this very run, so that the recording has to fit
            if (mean := _mean_turn(timeline.facts)) >= UNREACHABLE * reached:
                return plain_run(timeline.change_facts(plain_step=None), min(mean, round(reached)))
            if plain_step >= SLOWEST_HOST * reached:
                return _sampled(deflated, plain_step, factor)
        raise BadInput(
            f"{timeline.facts.named} cannot have a plain step of {option(plain_step)} ms: even without the cost "
            f"of recording its work takes {duration(round(reached))} a step; give --plain-step in milliseconds, "
            "measured on the same program."
        )
    return PlainTimeline(deflated, plain_step, plain_step / reached, factor)


def turn_of_part(timeline: Timeline) -> int | None:
    """What a step takes of which only a part was recorded, or a turn that nobody marked; None of other windows."""
    facts = timeline.facts
    steps = [run.step for run in facts.plain_runs.values() if run.steps]
    if not facts.one_turn or facts.reason is not None or facts.is_whole or facts.plain_step is not None:
        return None
    loop = facts.own_loop
    return max(steps, default=loop.usual if loop is not None and loop.turns else 0) or None


def within_its_loop(timeline: Timeline) -> Timeline:
    """A window on a script that saw little but one of its loops is a window on that loop, which a library may hold."""
    facts, host = timeline.facts, ~timeline.on_device
    loops = [part for part in (facts.run.parts if facts.run is not None else ()) if part.kind == LOOP and part.turns]
    if facts.reason is None or facts.reason.why != SCRIPT or not loops:
        return timeline
    line = _innermost_of(timeline, [part.place for part in loops])
    spent = (timeline.spans.end - timeline.spans.start)[host]
    inside = np.bincount(line[host] + 1, spent, len(loops) + 1)
    best = int(inside[1:].argmax())
    if 2 * inside[1 + best] <= inside.sum():
        return timeline
    return timeline.change_facts(loop=loops[best].named, reason=None)


def _sampled(timeline: Timeline, plain_step: int, factor: float) -> PlainTimeline:
    """A plain step that goes as these turns went, though they took less or more of it than can be explained."""
    reached, loop = max(1.0, pace(timeline)), timeline.facts.own_loop
    ratio, known = plain_step / reached, loop is not None and loop.busy != NONE and len(timeline.ranks) == 1
    at_work = plain_step * loop.busy // max(1, loop.time) if loop is not None and known else 0
    return PlainTimeline(timeline, plain_step, ratio, factor, min(ratio, 1 / ratio), at_work)


def _as_lines_took(sample: PlainTimeline) -> PlainTimeline:
    """Each line of the loop takes what the run's tree has of it, not what the beginning of a turn shows; and what the
    turn passes at lines that were not met there is unknown."""
    timeline, facts = sample.timeline, sample.timeline.facts
    loop = facts.own_loop
    if loop is None or len(timeline.ranks) > 1:
        return sample
    spans, held = timeline.spans, replay(timeline).spans
    lines = [line for line in loop.lines if line.time]
    line = _innermost_of(timeline, [line.place for line in lines])
    on_main = spans.lane == spans.lane[timeline.marks[0]]
    known = on_main & (line != NONE)
    seen = np.bincount(line[known], (held.end - held.start)[known], len(lines))
    took = np.array([one.time for one in lines], float) * sample.step / loop.time
    times = np.where(seen * LARGEST_STRETCH < took, 0.0, took / np.maximum(seen, 1.0))
    if not times.any():
        return sample
    launches = timeline.launches
    line[launches.target] = line[launches.source]
    elsewhere = sample.step / max(1.0, pace(timeline))  # the few rows at no line of the loop
    scale = np.append(np.where(times > 0, times, 1.0), elsewhere)[line]
    timeline = timeline.change_spans(work=(spans.work * scale).astype(np.int64))
    told = min(sample.step, round(took[times > 0].sum()))
    return replace(sample, timeline=timeline, ratio=told / max(1.0, pace(timeline)), unseen=sample.step - told)


def _innermost_of(timeline: Timeline, places: Sequence[str]) -> Ints:
    """Of each row, which of these lines it stands at; of several the innermost."""
    frames, number = timeline.frames, {place: index for index, place in enumerate(places)}
    told = [source_line(name) for name in timeline.names]
    of_name = [number.get(f"{one[0].removeprefix(INSTALLED)}:{one[1]}", NONE) if one else NONE for one in told]
    line = np.append(np.array(of_name, np.int64)[frames.name], NONE)
    for frame in np.flatnonzero((line[:-1] == NONE) & (frames.parent != NONE)).tolist():  # parents stand first
        line[frame] = line[frames.parent[frame]]
    return line[timeline.spans.frame]


def _mean_turn(facts: RunFacts) -> int:
    """Of the recorded loop, once it is warm. What a turn usually takes means nothing where many take far longer."""
    loop = facts.own_loop
    return loop.turn - loop.warm_up_time // loop.turns if loop is not None and loop.turns else 0


def _as_long_as_met(timeline: Timeline) -> Timeline:
    """A collective whose peers' windows do not reach it takes as long as others of its kind where all came.

    What it waited for is not known: at the end of a window it may be a peer that closes its own.
    """
    spans = timeline.spans
    rows = np.flatnonzero(spans.kind == Kind.COLLECTIVE)
    met = spans.meeting[rows] != NONE
    if met.all() or not met.any():
        return timeline
    work = spans.work.copy()
    _, kind = np.unique(np.stack([spans.group[rows], spans.name[rows], spans.size[rows]]), axis=1, return_inverse=True)
    for one in np.unique(kind[~met]).tolist():
        alone, together = rows[(kind == one) & ~met], rows[(kind == one) & met]
        if len(together):
            work[alone] = np.minimum(work[alone], int(np.median(work[together])))
    return timeline.change_spans(work=work)


def fed_as_usual(timeline: Timeline, plain_step: int | None) -> Timeline:
    """Loaders as slow as they are over the whole run, where those of the few recorded steps had batches in store.

    What a step waits for its input is known of every plain step; so is what a plain step takes.
    """
    waits = max((run.input for run in timeline.facts.plain_runs.values()), default=0)
    batches = by_workers(timeline)
    if plain_step is None or not batches.any() or waits < TELLING_CHANGE * plain_step:
        return timeline

    def stretched(times: float) -> Timeline:
        work = timeline.spans.work * np.where(batches, times, 1.0)
        return timeline.change_spans(work=work.astype(np.int64))

    def step_at(times: float) -> float:
        return pace(deflate(even_hosts(stretched(times)), USUAL_COST))

    wanted = min(plain_step, step_at(1.0) + waits)
    return stretched(_sought(step_at, 1.0, LONGEST_QUEUE, wanted))


def _with_ready_batches(timeline: Timeline, plain_step: int) -> Timeline:
    """Without the workers of a loader for which plain steps next to never wait.

    A window sees when a batch was taken, not when it was ready. Recording makes the loop slower, so batches seem to
    come no faster than that slower loop took them, and would hold up the plain one.
    """
    ready = [rank for rank, run in timeline.facts.plain_runs.items() if run.input < TELLING_CHANGE * plain_step]
    batches = by_workers(timeline) & np.isin(timeline.rank_of_rows, ready)
    return timeline.change_spans(work=np.where(batches, 0, timeline.spans.work))


def even_hosts(timeline: Timeline) -> Timeline:
    """Host work of ranks that are not late, as it usually is over all ranks and steps, for they do the same.

    What differs now and then is noise, which the slowest rank of each collective would pass on to all of them.
    """
    stretches = host_stretches(timeline) if len(timeline.ranks) > 1 else None
    if stretches is None:
        return timeline
    late, spent = stretches.late, stretches.spent
    punctual = np.where(late[:, :, None], np.nan, spent)
    typical = np.nanmedian(punctual.transpose(1, 0, 2).reshape(len(late[0]), -1), axis=1)
    wanted = np.where(late, stretches.usual, typical)[:, :, None]
    factor = (wanted / np.maximum(spent, 1.0)).ravel()
    work = timeline.spans.work * np.where(stretches.of_row == NONE, 1.0, factor[stretches.of_row])
    return timeline.change_spans(work=work.astype(np.int64))


def as_recorded(timeline: Timeline, misfit: BadInput) -> Timeline:
    """Without a plain step of its own, which does not fit what was recorded."""
    why = str(misfit).partition(";")[0]  # what to give in its place is for who gave it
    note = f"Shares and savings are those of the recorded steps: {why}."
    return timeline.change_facts(plain_step=None, notes=(*timeline.facts.notes, note))


def other_view(timeline: Timeline, plain: PlainTimeline) -> PlainTimeline:
    """The same run, had the recorder slowed all host work evenly instead of event by event."""
    timeline = even_hosts(timeline)
    if (
        plain.factor == 0.0
        or plain.alike < 1
        or pace(deflate(timeline, 0.0, SLOWEST_HOST)) > plain.step * (1 + FACTOR_TOLERANCE)
    ):
        return plain
    speed = _sought(lambda speed: pace(deflate(timeline, 0.0, speed)), SLOWEST_HOST, 1.0, plain.step)
    even = deflate(timeline, 0.0, speed)
    return PlainTimeline(even, plain.step, plain.step / pace(even), 0.0)


def _factor(timeline: Timeline, plain_step: int, recorded: float) -> float:
    """Found by halving; where the device sets the pace the host's factor cannot be seen, and the usual one is taken."""
    least = pace(deflate(timeline, LARGEST_COST))
    is_blind = (
        recorded - least < TELLING_CHANGE * recorded and abs(recorded - plain_step) < 4 * TELLING_CHANGE * plain_step
    )
    if is_blind:
        return USUAL_COST
    if recorded <= plain_step:  # the recording was no slower: leave its shape, scale the result
        return 0.0
    if least > plain_step * (1 + FACTOR_TOLERANCE):
        return LARGEST_COST
    return _sought(lambda factor: pace(deflate(timeline, factor)), LARGEST_COST, 0.0, plain_step)


def _no_slower_than_marks(timeline: Timeline, factor: float, speed: float) -> tuple[float, float]:
    """No less is taken out than what leaves the host as quick as marks have seen it where nothing held it up.

    Where the device sets the pace of the plain run the step says nothing of the host, however slow recording made it.
    """
    wanted = max((run.host for run in timeline.facts.plain_runs.values()), default=NONE)
    host = on_an_idle_device(timeline)
    if wanted == NONE or pace(deflate(host, factor, speed)) <= wanted * (1 + FACTOR_TOLERANCE):
        return factor, speed
    factor = _sought(lambda factor: pace(deflate(host, factor, speed)), LARGEST_COST, factor, wanted)
    if factor == LARGEST_COST:
        speed = _sought(lambda speed: pace(deflate(host, LARGEST_COST, speed)), SLOWEST_HOST, speed, wanted)
    return factor, speed


def on_an_idle_device(timeline: Timeline) -> Timeline:
    """As if all that the host ever waits for were done at once."""
    return timeline.change_spans(work=np.where(timeline.on_device | by_workers(timeline), 0, timeline.spans.work))


def _sought(step_at: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """The value between `low` (too short a step) and `high` (too long a one) that gives the step wanted.

    The step grows steadily in between, so a straight line finds it in a few trials; where one end
    stays put its weight is halved (the Illinois method).
    """
    below, above = step_at(low) - wanted, step_at(high) - wanted
    if below >= 0 or above <= 0:
        return low if below >= 0 else high
    middle, stayed = low, 0
    for _ in range(12):
        middle = (low * above - high * below) / (above - below)
        miss = step_at(middle) - wanted
        if abs(miss) < FACTOR_TOLERANCE * wanted:
            break
        if miss > 0:
            high, above = middle, miss
            below, stayed = (below / 2, 1) if stayed == 1 else (below, 1)
        else:
            low, below = middle, miss
            above, stayed = (above / 2, -1) if stayed == -1 else (above, -1)
    return middle
