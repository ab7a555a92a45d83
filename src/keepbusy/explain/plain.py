"""From the recorded run to the plain one: removes from host work what recording it cost.

Recording slows the host down, in proportion to what was recorded there. The cost of one event differs between machines,
so this finds the factor with which the unchanged run replays to the plain step. Device work stays as it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepbusy.causes.cause_inputs import by_workers
from keepbusy.causes.late_ranks import host_sections
from keepbusy.timeline.figures import duration, option
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import INSTALLED, source_line
from keepbusy.timeline.model import NONE, Floats, Ints, Kind, Timeline
from keepbusy.timeline.replay import pace, replay
from keepbusy.timeline.run_facts import LOOP, SCRIPT, RunFacts

USUAL_COST = 1.0
"""The factor on the machine on which the costs in traces/rank_timeline.py were measured."""
LARGEST_COST = 8.0
"""No recorder was seen to cost more than this. Whatever is missing then is a host that ran slower altogether."""
SLOWEST_HOST = 0.4
"""No host was seen with less than this share of its speed while it was recorded."""
TELLING_CHANGE = 0.03
"""If removing the recorder's whole cost changes a step by less than this share, the step says nothing about it."""
FACTOR_TOLERANCE = 0.002
"""The search for the factor stops this close to the step, as a share of it."""
LUCKIEST_RECORDING = 2.0
"""A recording may happen at a better moment of the machine, but not at one twice as good."""
LONGEST_QUEUE = 64.0
"""A batch may take workers so many times as long as it seemed, since they had prepared some in advance."""
LARGEST_STRETCH = 20.0
"""If a line takes more than so many times what was recorded of it, too little was recorded to scale it."""
UNREACHABLE = 0.75
"""A plain step below this share of what the run replays to without its recorder is not a step of this run."""


@dataclass(frozen=True)
class PlainTimeline:
    """The run without its recorder, as far as the recording shows."""

    timeline: Timeline
    step: int  # what the user measured, or what the recording shows
    ratio: float  # the step divided by what the unchanged timeline replays to
    factor: float  # how strongly the cost of recording was removed
    alike: float = 1.0  # how much of the plain step the recording explains, if it is only a sample of it
    at_work: int = 0  # how long the GPU works in such a step, by the run's tree
    unseen: int = 0  # how long such a step is at lines of which nothing was recorded


def deflate(timeline: Timeline, factor: float, speed: float = 1.0) -> Timeline:
    """Host work without its cost of recording, times the factor. Work never becomes negative."""
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
    """For each collective with missing ranks, how much longer it takes than its bytes need; 0 for other rows.

    The missing ranks were recorded, too, so waiting for them takes longer than in the plain run, as host work does.
    """
    spans, waits = timeline.spans, np.zeros(len(timeline))
    rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.work > 0))
    of_rank = np.unique(np.stack([spans.group[rows], timeline.rank_of_rows[rows]]), axis=1)
    groups, ranks_present = np.unique(of_rank[0], return_counts=True)
    members = np.array([timeline.facts.groups.get(group, 2) for group in groups.tolist()], np.int64)
    rows = rows[np.isin(spans.group[rows], groups[members > ranks_present])]
    if len(rows):
        size, work = spans.size[rows], spans.work[rows]
        needed = np.maximum(work.min(), size / max((size / work).max(), 1e-9))
        waits[rows] = np.maximum(work - needed, 0.0)
    return waits


def plain_run(timeline: Timeline, plain_step: int | None) -> PlainTimeline:
    """The timeline with which the unchanged run takes the plain step."""
    timeline = _with_usual_collectives(timeline)
    if plain_step is not None and plain_step == iteration_of_part(timeline):
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
        if plain_step == timeline.facts.plain_step:  # measured in this very run, so the recording has to fit
            if (mean := _mean_iteration(timeline.facts)) >= UNREACHABLE * reached:
                return plain_run(timeline.change_facts(plain_step=None), min(mean, round(reached)))
            if plain_step >= SLOWEST_HOST * reached:
                return _sampled(deflated, plain_step, factor)
        raise BadInput(
            f"{timeline.facts.named} cannot have a plain step of {option(plain_step)} ms: even without the cost "
            f"of recording its work takes {duration(round(reached))} a step; give --plain-step in milliseconds, "
            "measured on the same program."
        )
    return PlainTimeline(deflated, plain_step, plain_step / reached, factor)


def iteration_of_part(timeline: Timeline) -> int | None:
    """The duration of a step or unmarked iteration of which only a part was recorded; None for other windows."""
    facts = timeline.facts
    steps = [run.step for run in facts.plain_runs.values() if run.steps]
    if not facts.one_turn or facts.reason is not None or facts.is_whole or facts.plain_step is not None:
        return None
    loop = facts.own_loop
    return max(steps, default=loop.usual if loop is not None and loop.turns else 0) or None


def within_its_loop(timeline: Timeline) -> Timeline:
    """Turns a window on a script into one on its loop, if the window is mostly in one loop. That may be a library's."""
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
    """A plain step like the recorded iterations, although recording does not explain the difference in duration."""
    reached, loop = max(1.0, pace(timeline)), timeline.facts.own_loop
    ratio, at_work = plain_step / reached, 0
    if loop is not None and loop.busy != NONE and len(timeline.ranks) == 1:
        at_work = plain_step * loop.busy // max(1, loop.time)
    return PlainTimeline(timeline, plain_step, ratio, factor, min(ratio, 1 / ratio), at_work)


def _as_lines_took(sample: PlainTimeline) -> PlainTimeline:
    """Scales each line of the loop to its time in the run's tree, as only the beginning of an iteration was recorded.
    The time at lines without a recording stays unknown."""
    timeline, facts = sample.timeline, sample.timeline.facts
    loop = facts.own_loop
    if loop is None or len(timeline.ranks) > 1:
        return sample
    spans, replayed = timeline.spans, replay(timeline).spans
    lines = [line for line in loop.lines if line.time]
    line_of_row = _innermost_of(timeline, [line.place for line in lines])
    on_main = spans.lane == spans.lane[timeline.marks[0]]
    counted = on_main & (line_of_row != NONE)
    recorded = np.bincount(line_of_row[counted], (replayed.end - replayed.start)[counted], len(lines))
    expected = np.array([line.time for line in lines], float) * sample.step / loop.time
    factors = np.where(recorded * LARGEST_STRETCH < expected, 0.0, expected / np.maximum(recorded, 1.0))
    if not factors.any():
        return sample
    launches = timeline.launches
    line_of_row[launches.target] = line_of_row[launches.source]
    elsewhere = sample.step / max(1.0, pace(timeline))  # for the few rows at no line of the loop
    scale = np.append(np.where(factors > 0, factors, 1.0), elsewhere)[line_of_row]
    timeline = timeline.change_spans(work=(spans.work * scale).astype(np.int64))
    explained = min(sample.step, round(expected[factors > 0].sum()))
    return replace(
        sample, timeline=timeline, ratio=explained / max(1.0, pace(timeline)), unseen=sample.step - explained
    )


def _innermost_of(timeline: Timeline, places: Sequence[str]) -> Ints:
    """For each row, the index of the innermost of these lines around it, or NONE."""
    frames, number = timeline.frames, {place: index for index, place in enumerate(places)}
    lines = [source_line(name) or ("", 0, "") for name in timeline.names]
    of_name = [number.get(f"{file.removeprefix(INSTALLED)}:{line}", NONE) for file, line, _ in lines]
    of_frame = np.append(np.array(of_name, np.int64)[frames.name], NONE)
    for frame in np.flatnonzero((of_frame[:-1] == NONE) & (frames.parent != NONE)).tolist():  # parents come first
        of_frame[frame] = of_frame[frames.parent[frame]]
    return of_frame[timeline.spans.frame]


def _mean_iteration(facts: RunFacts) -> int:
    """The mean iteration of the recorded loop after its warm-up. The usual one says little if many take far longer."""
    loop = facts.own_loop
    return loop.turn - loop.warm_up_time // loop.turns if loop is not None and loop.turns else 0


def _with_usual_collectives(timeline: Timeline) -> Timeline:
    """Limits collectives that no peer's window contains to the usual duration of those that all ranks recorded.

    Their longer waits have no known reason: at the end of a window it may be a peer that closes its own.
    """
    spans = timeline.spans
    rows = np.flatnonzero(spans.kind == Kind.COLLECTIVE)
    present = spans.meeting[rows] != NONE
    if present.all() or not present.any():
        return timeline
    work = spans.work.copy()
    _, kind = np.unique(np.stack([spans.group[rows], spans.name[rows], spans.size[rows]]), axis=1, return_inverse=True)
    for number in np.unique(kind[~present]).tolist():
        alone, together = rows[(kind == number) & ~present], rows[(kind == number) & present]
        if len(together):
            work[alone] = np.minimum(work[alone], int(np.median(work[together])))
    return timeline.change_spans(work=work)


def fed_as_usual(timeline: Timeline, plain_step: int | None) -> Timeline:
    """Slows loaders down to their pace in the whole run, if in the few recorded steps they had batches in store.

    The duration of plain steps and how long each waits for its input were measured over the whole run.
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
    """Without the workers of loaders for which plain steps hardly ever wait.

    A window shows when a batch was taken, not when it was ready. Recording slows the loop down, so batches seem to come
    no faster than that slow loop took them, and would hold up the plain one.
    """
    ready = [rank for rank, run in timeline.facts.plain_runs.items() if run.input < TELLING_CHANGE * plain_step]
    batches = by_workers(timeline) & np.isin(timeline.rank_of_rows, ready)
    return timeline.change_spans(work=np.where(batches, 0, timeline.spans.work))


def even_hosts(timeline: Timeline) -> Timeline:
    """Sets the host work of ranks that are not late to its median over all these ranks and steps, as they do the same.

    Their differences are noise, which the slowest rank at each collective would pass on to all others.
    """
    sections = host_sections(timeline) if len(timeline.ranks) > 1 else None
    if sections is None:
        return timeline
    late, spent = sections.late, sections.spent
    punctual = np.where(late[:, :, None], np.nan, spent)
    typical = np.nanmedian(punctual.transpose(1, 0, 2).reshape(len(late[0]), -1), axis=1)
    wanted = np.where(late, sections.usual, typical)[:, :, None]
    factor = (wanted / np.maximum(spent, 1.0)).ravel()
    work = timeline.spans.work * np.where(sections.of_row == NONE, 1.0, factor[sections.of_row])
    return timeline.change_spans(work=work.astype(np.int64))


def as_recorded(timeline: Timeline, misfit: BadInput) -> Timeline:
    """Without the run's own plain step, which does not fit what was recorded."""
    reason = str(misfit).partition(";")[0]  # the rest says what to pass instead, and the user passed nothing
    note = f"Shares and savings are those of the recorded steps: {reason}."
    return timeline.change_facts(plain_step=None, notes=(*timeline.facts.notes, note))


def other_view(timeline: Timeline, plain: PlainTimeline) -> PlainTimeline:
    """The same run if the recorder had slowed all host work evenly instead of event by event."""
    if plain.factor == 0.0 or plain.alike < 1:
        return plain
    timeline = even_hosts(timeline)
    if pace(deflate(timeline, 0.0, SLOWEST_HOST)) > plain.step * (1 + FACTOR_TOLERANCE):
        return plain
    speed = _sought(lambda speed: pace(deflate(timeline, 0.0, speed)), SLOWEST_HOST, 1.0, plain.step)
    even = deflate(timeline, 0.0, speed)
    return PlainTimeline(even, plain.step, plain.step / pace(even), 0.0)


def _factor(timeline: Timeline, plain_step: int, recorded: float) -> float:
    """The factor to remove recording with. If the device sets the pace the step does not show it: the usual one."""
    least = pace(deflate(timeline, LARGEST_COST))
    is_near = abs(recorded - plain_step) < 4 * TELLING_CHANGE * plain_step
    if recorded - least < TELLING_CHANGE * recorded and is_near:
        return USUAL_COST
    if recorded <= plain_step:  # the recording was no slower: keep it, and scale the result
        return 0.0
    if least > plain_step * (1 + FACTOR_TOLERANCE):
        return LARGEST_COST
    return _sought(lambda factor: pace(deflate(timeline, factor)), LARGEST_COST, 0.0, plain_step)


def _no_slower_than_marks(timeline: Timeline, factor: float, speed: float) -> tuple[float, float]:
    """Removes at least so much that the host is as fast as marks have measured it when nothing held it up.

    If the device sets the pace of the plain run, its step does not show how slow recording made the host.
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
    """As if everything that the host waits for were done at once."""
    return timeline.change_spans(work=np.where(timeline.on_device | by_workers(timeline), 0, timeline.spans.work))


def _sought(step_at: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """The value between `low` (too short a step) and `high` (too long a one) that gives the step wanted.

    The step grows steadily in between, so straight lines find it in a few trials. If one end stays twice, its weight is
    halved (the Illinois method).
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
