"""What one recorded moment tells: its causes, ordered and fixed one after the other, told as a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_

import numpy as np

from keepbusy.explain.causes import Finding, findings
from keepbusy.explain.causes.peers import without_messages
from keepbusy.explain.diagnosis import CAUSES, COMPUTING, COPYING, PLACES, WIRE, Cause, Diagnosis, Harmless, Late
from keepbusy.explain.edit import Beside, Edit
from keepbusy.explain.ledger import Busy, Forecast
from keepbusy.explain.places import gathered, sites_of
from keepbusy.explain.plain import Plain, other_view, plain_run
from keepbusy.explain.remedies import Seen, remedy_for
from keepbusy.explain.scene import LARGE, Scene
from keepbusy.timeline.model import NONE, WORKERS, Direction, Ints, Kind, Timeline

# What decides between remedies of one cause.


def seen(scene: Scene, finding: Finding) -> Seen:
    spans, edit = scene.timeline.spans, finding.edit
    host_excess = np.maximum(spans.work - edit.work, 0)[~scene.timeline.on_device & edit.touched].sum()
    device_excess = (spans.work * (1 - edit.scale))[edit.scale < 1].sum()
    copies = scene.is_copy & (edit.beside > 0)
    home = copies & (spans.direction == Direction.DEVICE_TO_HOST)
    return Seen(
        unequal=bool(device_excess > host_excess),
        alone=bool(finding.cause == "peer_late" and (scene.apart[finding.rows] != NONE).all()),
        homeward=bool(spans.work[home].sum() > spans.work[copies & ~home].sum()),
        small=bool(spans.size[copies].max(initial=0) <= LARGE),
        peers=bool((spans.kind == Kind.COLLECTIVE).any()),
        again=_again(scene, np.flatnonzero(edit.beside == Beside.WIRE)),
    )


def _again(scene: Scene, rows: Ints) -> bool:
    """Each of several buckets of gradients travels more than once a step. Of a single one that could not be told."""
    spans, rank = scene.timeline.spans, scene.timeline.rank_of_rows
    reducing = np.array(["AllReduce" in name or "ReduceScatter" in name for name in scene.timeline.names], bool)
    mine = rows[reducing[spans.name[rows]] & (rank[rows] == scene.timeline.ranks[0])]
    times = np.unique(spans.size[mine], return_counts=True)[1] / scene.steps
    return len(times) > 1 and bool(times.min() > 1.5)


# Which ranks come late, by how much, and what they do meanwhile.

WORTH_NAMING = 0.2
"""Ranks that are late by less than this share of the latest one are not worth a line."""


def late_ranks(scene: Scene, finding: Finding | None) -> tuple[Late, ...]:
    if finding is None:
        return ()
    excess = np.where(finding.owner >= 0, finding.edit.saves(scene.timeline.spans.work), 0)
    rank = scene.timeline.rank_of_rows
    late = np.unique(rank[finding.rows]).tolist()
    found = [_late(scene, finding, one, np.where(rank == one, excess, 0)) for one in late]
    latest = max(one.late for one in found)
    return tuple(sorted((one for one in found if one.late >= WORTH_NAMING * latest), key=lambda one: -one.late))


def _late(scene: Scene, finding: Finding, rank: int, excess: Ints) -> Late:
    """The place that loses most, were its rank like the others."""
    rows = np.flatnonzero(excess)
    on_device = scene.timeline.on_device[rows]
    computing = excess[rows[on_device]].sum() > excess[rows[~on_device]].sum()
    rows = rows[on_device == computing]
    hosts = finding.owner[rows]
    of_host = np.bincount(hosts, excess[rows], len(excess))
    places = gathered(scene, np.unique(hosts), apart=True)
    worst = max(places, key=lambda place: of_host[places[place]].sum())
    ranks, late = len(scene.timeline.ranks), excess[rows].sum() / scene.steps
    if computing:  # it would keep its share of what it does beyond the others
        return Late(rank, int(late * ranks / (ranks - 1)), "computing", worst)
    return Late(rank, int(late), "host_work", worst)


# What a reader should know before trusting the figures, a sentence each.


def notes_of(whole: Timeline, scene: Scene, plain: Plain, plain_given: bool) -> tuple[str, ...]:
    notes = [*whole.facts.notes]  # what the recorder has to say itself
    if not plain_given and whole.facts.recorded is None:
        notes.append(
            "Profiling makes the host slower: a trace shows two to three times the idle time of the plain run. "
            "Time a step without the profiler and give it with --plain-step."
        )
    if not whole.facts.values:
        notes.append("The run computed nothing: what it would have computed reads as zero.")
    if whole.facts.modelled:
        notes.append("The host's time is modelled: Python, files and loader workers take none, operators do.")
    if not whole.facts.stacks:
        notes.append("Without stacks the places are operators, not lines; record with with_stack=True for lines.")
    if whole.facts.skipped:
        notes.append(f"{whole.facts.skipped} events of the trace could not be read, and are missing here.")
    if whole.facts.marks_a_step:
        notes.append(f"{whole.facts.marks_a_step} marked steps count as one: the plain step given is that long.")
    if left_out := whole.facts.left_out_steps:
        which = f"step{'s' if len(left_out) > 1 else ''} {' and '.join(map(str, left_out))}"
        notes.append(f"Of these, {which} stalled as steps do now and then, and is told of apart.")
    steps = len(whole.marks_of(whole.ranks[0]))
    if scene.steps < steps:
        notes.append(f"Replayed were {scene.steps} of the {steps} steps, evenly from the fastest to the slowest.")
    if _peers_missing(whole):
        notes.append("Peers of this rank are not in the recording, so waiting for them counts as the wire.")
    if plain_given and not 0.85 < plain.ratio < 1.15:
        notes.append("The plain step and the recording differ by more than recording explains; " + _why_differ(whole))
    return tuple(notes)


def _why_differ(whole: Timeline) -> str:
    """Plain step and recording of one run are of the same program: only that moment can have been another."""
    if whole.facts.recorded is not None:
        return "the recorded steps may have met a busy moment of the machine: record again, or with another --after."
    return "were they of the same program and machine?"


def _peers_missing(timeline: Timeline) -> bool:
    groups = timeline.facts.groups
    met = timeline.spans.group[timeline.spans.kind == Kind.COLLECTIVE]
    return any(groups.get(group, 2) > len(timeline.ranks) for group in np.unique(met).tolist())


# What happened, in a sentence with its counts. Durations are left to the report.


def what_happened(scene: Scene, finding: Finding) -> str:
    return _SENTENCES[finding.cause](scene, finding)


def times(count: float) -> str:
    """Once, twice, 12 times a step."""
    if count < 0.95:
        return f"once in {round(1 / max(count, 1e-3))} steps"
    rounded = round(count)
    return {1: "once a step", 2: "twice a step"}.get(rounded, f"{rounded} times a step")


def _count(scene: Scene, finding: Finding) -> float:
    return finding.seen / scene.steps / len(scene.timeline.ranks)


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def _moved(scene: Scene, finding: Finding) -> str:
    spans = scene.timeline.spans
    copies = (finding.edit.beside > 0) & (spans.kind == Kind.COPY)
    return _bytes(float(spans.size[copies].sum()) / scene.steps / len(scene.timeline.ranks))


def _reads(scene: Scene, finding: Finding) -> str:
    return f"The host stops {times(_count(scene, finding))} until the device has caught up, and loses its lead."


def _blocking(scene: Scene, finding: Finding) -> str:
    return f"{_moved(scene, finding)} a step are copied while the host waits ({times(_count(scene, finding))})."


def _in_line(scene: Scene, finding: Finding) -> str:
    return f"{_moved(scene, finding)} a step are copied in line with the kernels, when they could travel beside them."


def _inputs(scene: Scene, finding: Finding) -> str:  # noqa: ARG001
    if scene.by_workers.any():
        return "The loop waits for the loader's workers, and the GPU for the loop."
    return "The training process prepares its own batches, and the GPU waits for its input."


def _made(scene: Scene, finding: Finding) -> str:
    return f"A tensor is made on the host and then copied to the device ({times(_count(scene, finding))})."


def _launches(scene: Scene, finding: Finding) -> str:
    launches = _count(scene, finding)
    return f"The host cannot enqueue {launches:,.0f} launches a step as fast as the GPU works them off."


def _allocations(scene: Scene, finding: Finding) -> str:
    count = times(_count(scene, finding))
    return f"The driver is asked for memory, or given it back, {count}; some of these calls stop the device."


def _work(scene: Scene, finding: Finding) -> str:  # noqa: ARG001
    return "The training thread does other work between its launches, and the GPU has nothing to do meanwhile."


def _late_sentence(scene: Scene, finding: Finding) -> str:
    late = sorted(one.rank for one in late_ranks(scene, finding))
    several = f"ranks {', '.join(map(str, late[:-1]))} and {late[-1]}" if len(late) <= 4 else f"{len(late)} ranks"
    named = f"rank {late[0]}" if len(late) == 1 else several
    comes = "comes" if len(late) == 1 else "come"
    return f"{named.capitalize()} {comes} late to the collectives, and the others wait there."


def _exposed(scene: Scene, finding: Finding) -> str:
    count = times(_count(scene, finding))
    return f"Collectives ({count}) stand in line with the compute instead of travelling beside it."


_SENTENCES: dict[str, Callable[[Scene, Finding], str]] = {
    "host_sync": _reads,
    "blocking_copy": _blocking,
    "copy_not_overlapped": _in_line,
    "input_late": _inputs,
    "made_on_host": _made,
    "launch_bound": _launches,
    "allocator": _allocations,
    "host_work": _work,
    "peer_late": _late_sentence,
    "exposed_collective": _exposed,
}


def why_harmless(named: set[str], waiting_share: float) -> str:
    if waiting_share < 0.05:
        return "the GPU has work all the time"
    if "launch_bound" in named:
        return "the step is launch-bound: the host would not have been ahead anyway"
    return "something else holds the step up at the same time"


RESIDUAL = ("launch_bound", "host_work")
"""Causes that every program has a little of; in the ledger they take what the others leave."""
GENERAL = ("blocking_copy", "copy_not_overlapped", *RESIDUAL)
"""Causes that come after others of the same gain, which say more of what to do."""
HELD_BY = {
    WORKERS: ("input_late",),
    "workers": ("input_late",),
    "fetching": ("blocking_copy", "copy_not_overlapped"),
    "bringing home": ("blocking_copy",),
    "wire": ("exposed_collective",),
}
"""Lanes on which the fixed work goes on, and whose work it is."""
SHARED = 0.2
"""A cause that keeps less than this share of its gain beside another one recovers the same wait."""
SILENT = (*RESIDUAL, "exposed_collective", "made_on_host")
"""Causes that are not worth a line when they cost nothing."""


@dataclass(eq=False)
class Story:
    """Whole steps, replayed as they were and fixed."""

    scene: Scene
    forecast: Forecast
    found: dict[str, Finding]
    fixed: tuple[str, ...]

    @staticmethod
    def of(window: Timeline, plain_step: int | None, workers: int, fixed: Sequence[str] = ()) -> Story:
        plain = plain_run(window, plain_step)
        scene = Scene(plain.timeline, workers)
        return Story(scene, Forecast(plain, other_view(window, plain)), findings(scene), tuple(fixed))

    @property
    def plain(self) -> Plain:
        return self.forecast.plain

    @cached_property
    def unchanged(self) -> Busy:
        return self.forecast.spent(Edit.nothing(self.scene.timeline))

    def gain(self, cause: str) -> int:
        return self.forecast.gain(self.found[cause].edit)

    def told(self, whole: Timeline, plain_given: bool) -> Diagnosis:
        named = self._named()
        ledger = self._ledger(named)
        share = sum(ledger[cause] for cause in CAUSES if cause in ledger) / self.plain.step
        timeline = self.scene.timeline
        return Diagnosis(
            plain_step=self.plain.step,
            plain_given=plain_given,
            traced_step=_traced_step(whole),
            steps=len(whole.marks_of(whole.ranks[0])),
            ledger=ledger,
            causes=tuple(self._cause(cause, named[:place]) for place, cause in enumerate(named)),
            harmless=self._harmless(named, share),
            predicted=self.forecast.predict(self._together(self.fixed) if self.fixed else self._all(named)),
            noise=self.forecast.noise,
            ranks=tuple(timeline.ranks),
            late=late_ranks(self.scene, self.found.get("peer_late") if "peer_late" in named else None),
            fixed=self.fixed,
            device=timeline.facts.device,
            sources=_sources(timeline),
            notes=(*notes_of(whole, self.scene, self.plain, plain_given), *self._unseen()),
            plain_runs=timeline.facts.plain_runs,
        )

    def _unseen(self) -> list[str]:
        return [f"{cause} was not seen in this run." for cause in self.fixed if cause not in self.found]

    def _named(self) -> list[str]:
        """Causes whose fixing gains more than the noise, the largest gain first; among equals the more specific."""
        claimed = [cause for cause in self.found if self.gain(cause) > self.forecast.noise]
        return sorted(claimed, key=lambda cause: (-self.gain(cause), cause in GENERAL))

    def _together(self, causes: Sequence[str]) -> Edit:
        edits = [self.found[cause].edit for cause in causes if cause in self.found]
        return reduce(or_, edits, Edit.nothing(self.scene.timeline))

    def _all(self, named: Sequence[str]) -> Edit:
        """All that are named, or the first alone where the others would only crowd the lane that it moves to."""
        return min([self._together(named), *(self.found[cause].edit for cause in named[:1])], key=self.forecast.step)

    def _ledger(self, named: Sequence[str]) -> dict[str, int]:
        """Fix one cause after the other: the time it gives back is its row. What then is left has no cause we know."""
        order = [*named, *(cause for cause in self.found if cause not in named)]
        order.sort(key=lambda cause: cause in RESIDUAL)
        waits, left, edit = {}, self.unchanged.held_up, Edit.nothing(self.scene.timeline)
        for cause in order:
            edit = edit | self.found[cause].edit
            after = min(left, self.forecast.spent(edit).held_up)
            waits[cause], left = left - after, after
        waits["pipeline_bubble"] = self._bubble(edit, left)
        left -= waits["pipeline_bubble"]
        last = self.forecast.spent(edit)
        copying = min(left, last.copying)
        wire = min(left - copying, last.wire)
        left -= copying + wire
        # where even the fixed lane is the slowest, what is left is its cause's, too: workers can only do so much
        still = next((cause for cause in order if cause in HELD_BY.get(last.paced_by, ())), "unknown")
        rest = {COPYING: copying, WIRE: wire, still: waits.get(still, 0.0) + left}
        return _rounded(self.plain.step, {COMPUTING: self.unchanged.computing, **waits, **rest})

    def _bubble(self, edit: Edit, left: float) -> float:
        """Of what is left once all is fixed, how long stages of a pipeline wait for each other."""
        messages = without_messages(self.scene)
        if not messages.beside.any():
            return 0.0
        waiting, without = (self.forecast.spent(one).waiting for one in (edit, edit | messages))
        return min(left, max(0.0, waiting - without))

    def _cause(self, cause: str, earlier: Sequence[str]) -> Cause:
        finding = self.found[cause]
        sites = sites_of(self.scene, finding, self.forecast, self.gain(cause))
        remedy = remedy_for(cause, sites[0].where, seen(self.scene, finding))
        count = finding.seen / self.scene.steps / len(self.scene.timeline.ranks)
        return Cause(
            cause=cause,
            wait=round(max(0.0, self.unchanged.held_up - self.forecast.spent(finding.edit).held_up)),
            count=count,
            sites=sites,
            what=what_happened(self.scene, finding),
            fix=remedy.fix,
            advice=remedy.advice,
            remedy=remedy.code.format(workers=self.scene.workers),
            api=remedy.api,
            predicted=self.forecast.predict(finding.edit),
            same_wait_as=self._same_wait_as(cause, earlier),
        )

    def _same_wait_as(self, cause: str, earlier: Sequence[str]) -> str:
        """The first cause before this one on top of which it gains little more."""
        for other in earlier:
            together = self.forecast.gain(self.found[other].edit | self.found[cause].edit)
            if together - self.gain(other) < max(SHARED * self.gain(cause), self.forecast.noise):
                return other
        return ""

    def _harmless(self, named: Sequence[str], waiting_share: float) -> tuple[Harmless, ...]:
        per_step = self.scene.steps * len(self.scene.timeline.ranks)
        rows = []
        for cause, finding in self.found.items():
            if cause in named or cause in SILENT:
                continue
            why = why_harmless(set(named), waiting_share)
            for place, mine in gathered(self.scene, finding.rows).items():
                rows.append(Harmless(cause, place, len(mine) / per_step, why, max(0, self.gain(cause))))
        return tuple(sorted(rows, key=lambda one: -one.count))


def _rounded(total: int, parts: dict[str, float]) -> dict[str, int]:
    """Whole nanoseconds that sum to the step; computing takes what rounding leaves."""
    whole = {place: round(parts[place]) for place in PLACES if place in parts}
    whole[COMPUTING] += total - sum(whole.values())
    return {place: time for place, time in whole.items() if time > 0 or place == COMPUTING}


def _traced_step(whole: Timeline) -> int:
    """As the host's marks show it, recording included."""
    rank = whole.ranks[0]
    rows = np.flatnonzero((whole.rank_of_rows == rank) & ~whole.on_device)
    spans, marks = whole.spans, whole.marks_of(rank)
    left_out = whole.facts.left_out_time
    return int((spans.end[rows].max() - spans.start[marks[0]] - left_out) / len(marks))


def _sources(timeline: Timeline) -> tuple[str, ...]:
    return timeline.facts.sources or tuple(filter(None, [timeline.facts.source]))
