"""What is said of a cause: where in the program it is, no more exactly than the recording knows it; what happened
there, in a sentence; and what to do about it, as a fix's name, a sentence and a line of code.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keepbusy.explain.capture import Capture, captured
from keepbusy.explain.causes import IN_A_ROW, Draft, Finding, Scene
from keepbusy.explain.diagnosis import LateRank, SideLane, Where, named
from keepbusy.timeline.figures import amount, times
from keepbusy.timeline.frame_roles import INSTALLED, Owner, Role, source_line
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, FrameKind, Ints, Kind, Mask, Timeline, next_kept
from keepbusy.timeline.run_facts import RunFacts


class Remedy(NamedTuple):
    """What to do about a cause."""

    fix: str
    advice: str
    code: str = ""
    api: str = ""
    blockers: tuple[Where, ...] = ()  # lines that stand in the way of a better fix


_TABLES = tomllib.loads(Path(__file__).with_name("remedies.toml").read_text(encoding="utf-8"))
REMEDIES = {cause: Remedy(**told) for cause, told in _TABLES["usual"].items()}
"""By cause, where nothing more particular was seen."""
PARTICULAR = {name: Remedy(**told) for name, told in _TABLES["particular"].items()}
REMOVES_WAIT = (
    *("readback", "drop_checks", "drop_sync", "keep_shapes", "tell_sizes", "read_at_once", "fuse_optimizer"),
    "create_on_gpu",
)
"""Fixes after which nothing waits there any more, so that it can be captured."""
GONE_IN_A_GRAPH = ("drop_checks", "fuse_optimizer", "create_on_gpu")
"""Of these, what nothing needs to be written for there: a graph is captured without argument checks, and with
optimizers that count on the device; and tensors are made elsewhere."""
FEW_AT_A_TIME = ("keep_shapes", "tell_sizes")
"""Of these not where a loop chooses again and again: that becomes one call, if anything."""
LEAST_CAPTURED = 0.5
"""Of the launches: where graphs hold fewer, capturing is not what to do."""
SYNCS = {
    Role.CHOOSES: "keep_shapes",
    Role.REPEATS: "tell_output_size",
    Role.COUNTS: "tell_sizes",
    Role.SYNCHRONIZES: "drop_sync",
}
"""Of a read, by what the called operator does."""


def setting_of(causes: Sequence[str], holders: Sequence[str]) -> str:
    """What the fix of these causes is called by the trainer among those that hold a loop; nothing where it has none."""
    trainers: dict[str, dict[str, str]] = _TABLES["trainer"]
    known = [settings for trainer, settings in trainers.items() for one in holders if one.startswith(trainer)]
    return next((settings[cause] for settings in known for cause in causes if cause in settings), "")


class PlacedCause(NamedTuple):
    """A cause at one place."""

    scene: Scene
    finding: Finding
    where: Where
    rows: Ints


def remedy_for(scene: Scene, finding: Finding, where: Where, rows: Ints) -> Remedy:
    """By the cause, a place, and what was seen of it there."""
    choose = CHOICES.get(finding.cause)
    remedy = (choose(PlacedCause(scene, finding, where, rows)) if choose else None) or REMEDIES[finding.cause]
    return remedy._replace(code=remedy.code.replace("{workers}", str(scene.workers)))


def _of_a_late_rank(seen: PlacedCause) -> Remedy | None:
    """What only one rank does can be shared, or written later; what all do can be dealt out evenly."""
    if writes_checkpoint(seen.scene, seen.rows):
        return PARTICULAR["checkpoint"]
    if (seen.scene.loader_frame[seen.rows] != NONE).all():
        return PARTICULAR["late_loader"]
    return PARTICULAR["one_for_all"] if (seen.scene.frame_of_one_rank[seen.rows] != NONE).all() else None


def _of_launches(seen: PlacedCause) -> Remedy | None:
    """What would take them away has its price, which a script that runs once never earns back."""
    scene = seen.scene
    if scene.timeline.facts.runs_once:
        return PARTICULAR["launched_once"]
    if (scene.timeline.spans.kind == Kind.COLLECTIVE).any():
        return PARTICULAR["compiled_among_ranks"]
    if capture_of(scene).share < LEAST_CAPTURED:
        return _with_what_stays(PARTICULAR["compiled"], seen)
    operators = scene.timeline.frames.kind == FrameKind.OPERATOR
    trains = scene.frames_with(Role.BACKWARD | Role.OPTIMIZER).any() or not operators.any()
    return None if trains else PARTICULAR["inference_captured"]


@lru_cache(maxsize=1)
def capture_of(scene: Scene) -> Capture:
    """What graphs can hold, once all waits are gone that a fix takes away. Statements that are captured can be parted
    from a wait that stands beside them, but not from one within what they call."""
    waits = np.flatnonzero(scene.is_sync & ~scene.waits_for_large_copy)
    goes, nothing = np.zeros(len(scene.timeline), bool), Draft("host_sync", scene.timeline).finding()
    by_hand, elsewhere = dict[tuple[str, str], list[Ints]](), list[str]()
    for where, rows in by_place(scene, waits).items():
        remedy = _of_a_sync(PlacedCause(scene, nothing, where, rows)) or REMEDIES["host_sync"]
        often = len(rows) >= IN_A_ROW * scene.steps and remedy.fix in FEW_AT_A_TIME
        goes[rows] = remedy.fix in REMOVES_WAIT and not often
        if remedy.fix == "create_on_gpu":
            elsewhere.append(named(remedy.fix, [where]))
        if goes[rows].any() and remedy.fix not in GONE_IN_A_GRAPH:
            by_hand.setdefault((where.file, where.function), []).append(rows)
    beside = np.zeros(len(scene.timeline), bool)
    beside[[row for rows in by_hand.values() for part in rows for row in part]] = True
    found = captured(scene, goes, beside)
    found = found._replace(first=next(iter(elsewhere), ""))
    within = by_hand.keys() - {(one.file, one.function) for one in found.lines}
    if not within or not found.lines:
        return found
    for place in within:
        for rows in by_hand[place]:
            goes[rows] = beside[rows] = False
    return captured(scene, goes, beside)._replace(first=found.first)


def _with_what_stays(compiled: Remedy, seen: PlacedCause) -> Remedy:
    """For what most graphs end, and what does away with the wait there."""
    scene = seen.scene
    waits = np.flatnonzero(scene.is_sync & ~scene.waits_for_large_copy)
    if len(np.unique(scene.last_launch[waits])) <= scene.steps:
        return compiled._replace(advice=f"{compiled.advice} its steps differ in what they launch.")
    places = by_place(scene, waits)
    where, *others = sorted(places, key=lambda place: -len(places[place]))
    often = times(len(places[where]) / scene.steps / len(scene.timeline.ranks))
    more = f" and {len(others)} more" if others else ""
    remedy = _of_a_sync(seen._replace(where=where, rows=places[where])) or REMEDIES["host_sync"]
    why = f"it reads GPU values in its middle ({often} at {where}{more}). At those lines: {remedy.advice}"
    return compiled._replace(advice=f"{compiled.advice} {why}", blockers=(where, *others))


def _of_a_copy(seen: PlacedCause) -> Remedy | None:
    """What goes to the host is none of a batch that could be fetched ahead, nor are shards that FSDP keeps there, nor
    what `save_on_cpu` keeps there for the backward pass."""
    if seen.scene.within(Role.SHARDS)[seen.rows].all():
        return PARTICULAR["offloaded"]
    spans, runs_once = seen.scene.timeline.spans, seen.scene.timeline.facts.runs_once
    copies = seen.scene.is_copy & np.isin(seen.finding.culprit, seen.rows)
    kept = copies & kept_on_host(seen.scene)
    if 2 * spans.size[kept].sum() > spans.size[copies].sum():
        is_pinned = spans.pinned[kept].all()
        return PARTICULAR["kept_in_pinned_memory" if is_pinned else "kept_in_pageable_memory"]
    back = copies & (spans.direction == Direction.DEVICE_TO_HOST)
    if seen.finding.cause == "copy_not_overlapped":
        return PARTICULAR["beside"] if back.sum() == copies.sum() or runs_once else None
    if spans.work[back].sum() > spans.work[copies & ~back].sum():
        return PARTICULAR["checkpoint" if writes_checkpoint(seen.scene, seen.rows) else "copy_back_later"]
    if spans.size[copies].max(initial=0) <= STAGED_BYTES:
        return PARTICULAR["keep_on_device"]
    is_pinned = spans.pinned[copies].all()  # from there nobody waits but who asks to
    return PARTICULAR["drop_sync" if is_pinned else "pinned"] if runs_once else None


def kept_on_host(scene: Scene) -> Mask:
    """Which copies take to the host what the backward pass needs, or bring it back there, as `save_on_cpu` does: as
    much comes back as has left."""
    spans, launched = scene.timeline.spans, np.append(scene.within(Role.BACKWARD), False)[scene.launch]
    large = scene.is_copy & (scene.launch != NONE) & (spans.size > STAGED_BYTES)
    back = large & launched & (spans.direction == Direction.HOST_TO_DEVICE)
    home = large & ~launched & (spans.direction == Direction.DEVICE_TO_HOST)
    return (home & np.isin(spans.size, spans.size[back])) | (back & np.isin(spans.size, spans.size[home]))


def _of_memory(seen: PlacedCause) -> Remedy | None:
    """What is given back within no operator was asked for by the program; else no free piece fitted."""
    rows, role = seen.finding.rows, seen.scene.timeline.spans.role[seen.finding.rows]
    of_device = 2 * np.count_nonzero(role & Role.ASKS_MEMORY) > np.count_nonzero(role & Role.GIVES_BACK == 0)
    return PARTICULAR["expanded"] if of_device and not seen.scene.is_given_back[rows].any() else None


_IN_THE_WAY = {
    "max_split_size_mb": "keeps large pieces whole",
    "garbage_collection_threshold": "gives memory back that is asked for again",
    "expandable_segments:False": "forbids segments to grow",
}


def allocator_told(facts: RunFacts) -> str:
    """What the program's environment told the allocator, where that was seen."""
    if facts.allocator is None:
        return "What PYTORCH_ALLOC_CONF was is not known of a trace."
    if "expandable_segments:True" in facts.allocator:
        return f"{facts.allocator} was set: segments grow already, so pad to a few sizes, or keep less alive."
    why = [f"{name}, which {what}" for name, what in _IN_THE_WAY.items() if name in facts.allocator]
    if why:
        return f"{facts.allocator} was set: leave out {', and '.join(why)}."
    return f"{facts.allocator} was set." if facts.allocator else "PYTORCH_ALLOC_CONF was not set."


def _of_a_sync(seen: PlacedCause) -> Remedy | None:
    if writes_checkpoint(seen.scene, seen.rows):
        return PARTICULAR["checkpoint"]
    if seen.finding.edit.drop.any() and seen.finding.edit.drop[seen.rows].any():
        return PARTICULAR["send_tensors"]
    if _waits_going_back(seen):
        moves = seen.scene.within(Role.MOVES)[seen.rows]
        return PARTICULAR["gradient_moves" if 2 * np.count_nonzero(moves) > len(moves) else "waits_going_back"]
    if (seen.scene.library_role[seen.rows] & Role.SCALER).any():
        return PARTICULAR["scaler"]
    if (seen.scene.library_role[seen.rows] & Role.VALIDATES).any():
        return PARTICULAR["unchecked"]
    rows = seen.scene.shown_at[seen.rows]
    in_library = np.isin(seen.scene.caller[rows], (Owner.LIBRARY, Owner.TORCH))
    if seen.where.file and 2 * np.count_nonzero(in_library) > len(rows):
        if seen.scene.within(Role.PRINTS)[rows[in_library]].any():
            return PARTICULAR["printed"]
        inside = PARTICULAR["called_in_library"]
        return inside._replace(advice=inside.advice.replace("{library}", seen.where.library))
    called, run = _role_of_call(seen.scene.timeline, int(rows[0])), seen.scene.timeline.facts.run
    known = next((PARTICULAR[name] for role, name in SYNCS.items() if called & role), None)
    if known is None and run is not None and str(seen.where) in run.decides:
        return PARTICULAR["decided_here"]
    in_a_row = np.isin(seen.rows, [rows[0] for rows in seen.scene.reads_in_a_row]).all()
    return PARTICULAR["read_at_once"] if known is None and in_a_row else known


def _waits_going_back(seen: PlacedCause) -> bool:
    """Whether it is a backward pass that waits, and no hook of the program's in it."""
    scene, frames = seen.scene, seen.scene.timeline.frames
    if not scene.within(Role.BACKWARD)[seen.rows].all():
        return False
    node, line = scene.innermost(scene.frames_with(Role.BACKWARD))[seen.rows], scene.innermost_line[seen.rows]
    return bool(((line == NONE) | (frames.start[line] <= frames.start[node])).all())


def _of_a_collective(seen: PlacedCause) -> Remedy | None:
    """By whose it is: gradients that travel too often or too late, parameters that FSDP gathers, or values."""
    scene, launch = seen.scene, seen.scene.launch[seen.rows]
    rows = np.where(launch == NONE, seen.rows, launch)  # of a collective that nobody launched here, itself
    if scene.within(Role.THROUGH_HOST)[rows].all():
        return PARTICULAR["from_gpu_to_gpu"]
    of_gradients = scene.hands_over_gradients[rows].any()
    if seen.finding.edit.drop[rows].any():
        return PARTICULAR["send_once" if of_gradients else "average_once"]
    if scene.within(Role.SHARDS)[rows].any():
        return PARTICULAR["sharded"]
    if of_gradients:
        return PARTICULAR["in_buckets"]
    if _sends_buffers(scene, int(rows[0])):
        return PARTICULAR["own_buffers"]
    return PARTICULAR["needed_at_once"] if _before_the_gradients(scene, int(rows[0])) else None


def _sends_buffers(scene: Scene, row: int) -> bool:
    """DDP broadcasts them before each forward pass, from within its own call."""
    frames, frame = scene.timeline.frames, int(scene.timeline.spans.frame[row])
    broadcasts = frame != NONE and frames.role[frame] & Role.BROADCASTS
    around = takewhile(lambda one: frames.kind[one] != FrameKind.PYTHON, frames.around(frame))
    return bool(broadcasts) and any(frames.role[one] & Role.DDP_FORWARD for one in around)


def _before_the_gradients(scene: Scene, row: int) -> bool:
    """Whether a backward pass is still to come in its step, or to be finished; so it is also where there is none."""
    timeline = scene.timeline
    mine = timeline.rank_of_rows == timeline.rank_of_rows[row]
    backward = mine & scene.within(Role.BACKWARD)
    marks = np.append(timeline.marks[mine[timeline.marks]], len(timeline))
    return bool(backward[row : marks[np.searchsorted(marks, row, side="right")]].any()) or not backward.any()


def _of_work(seen: PlacedCause) -> Remedy | None:
    """Not all that holds Python up is work of the program's own, nor can all of it go on beside the GPU."""
    if writes_checkpoint(seen.scene, seen.rows):
        return PARTICULAR["checkpoint"]
    work, sends = seen.scene.timeline.spans.work[seen.rows], seen.scene.within(Role.OBJECTS)[seen.rows]
    if 2 * work[sends].sum() > work.sum():
        return PARTICULAR["send_tensors"]
    if _prepares(seen):
        return PARTICULAR["pad_lengths"]
    if _collects(seen):
        return PARTICULAR["collect_between"]
    if _steps_offloaded(seen):
        return PARTICULAR["offloaded"]
    if _picks(seen):
        return PARTICULAR["picked_on_gpu"]
    return PARTICULAR["needs_the_value"] if (seen.scene.needs_read[seen.rows] != NONE).all() else None


def _has_workers(seen: PlacedCause) -> bool:
    return bool(seen.scene.within(Role.LOADER_WORKERS)[seen.rows].any())


def _prepares(seen: PlacedCause) -> bool:
    """Whether it is PyTorch that works, before it launches a kernel: cuDNN looks for one whenever a shape is new."""
    scene, frame = seen.scene, seen.scene.timeline.spans.frame[seen.rows]
    work = scene.timeline.spans.work[seen.rows]
    layers = np.append(scene.frames_with(Role.LAYER) & ~scene.launch_free, False)
    return bool(2 * work[layers[frame]].sum() > work.sum())


def _picks(seen: PlacedCause) -> bool:
    """Whether rows are taken out of what stays on the host and go to the GPU next, or come from it and go there."""
    scene, spans = seen.scene, seen.scene.timeline.spans
    command, large = np.append(scene.command, NONE), scene.is_copy & (spans.size > STAGED_BYTES)
    after = command[next_kept(spans.lane, scene.command != NONE)[seen.rows]]
    before = command[scene.last_launch[seen.rows]]
    goes, came = (
        np.append(large & (spans.direction == way), False)[one]
        for way, one in ((Direction.HOST_TO_DEVICE, after), (Direction.DEVICE_TO_HOST, before))
    )
    work = spans.work[seen.rows]
    return bool(2 * work[scene.within(Role.PICKS)[seen.rows] & (goes | came)].sum() > work.sum())


def _collects(seen: PlacedCause) -> bool:
    """Whether it takes as long as Python's garbage collector does in each step."""
    timeline = seen.scene.timeline
    collector = max((run.collector for run in timeline.facts.plain_runs.values()), default=0)
    takes = timeline.spans.work[seen.rows].sum() / seen.scene.steps / len(timeline.ranks)
    return bool(takes < 2 * collector < 4 * takes)


def _steps_offloaded(seen: PlacedCause) -> bool:
    """Whether it is an optimizer's, of shards that FSDP copies between the host and the GPU."""
    scene, spans = seen.scene, seen.scene.timeline.spans
    crosses = scene.is_copy & np.isin(spans.direction, (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST))
    launches = scene.launch[crosses & (spans.size > STAGED_BYTES) & (scene.launch != NONE)]
    steps = spans.work[seen.rows][scene.within(Role.OPTIMIZER)[seen.rows]].sum()
    return bool(2 * steps > spans.work[seen.rows].sum() and scene.within(Role.SHARDS)[launches].any())


def writes_checkpoint(scene: Scene, rows: Ints) -> bool:
    return bool(2 * np.count_nonzero(scene.within(Role.WRITES)[rows]) > len(rows))


_MAKERS = {"arange", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randperm", "zeros"}
"""What makes a tensor of nothing but its arguments, and takes a device, as `torch.randn` does."""


def _of_a_maker(seen: PlacedCause) -> Remedy | None:
    timeline, usual = seen.scene.timeline, REMEDIES["made_on_host"]
    frame = seen.scene.outermost(seen.scene.frames_with(Role.MAKES))[np.isin(seen.finding.culprit, seen.rows)]
    made = {timeline.names[name].rpartition("::")[2] for name in timeline.frames.name[frame[frame != NONE]].tolist()}
    if len(made) != 1 or (name := made.pop()) not in _MAKERS:
        return None
    return usual._replace(code=usual.code.replace("torch.randn(shape", f"torch.{name}(..."), api=f"torch.{name}")


CHOICES: dict[str, Callable[[PlacedCause], Remedy | None]] = {
    "peer_late": _of_a_late_rank,
    "launch_bound": _of_launches,
    "exposed_collective": _of_a_collective,
    "made_on_host": _of_a_maker,
    "input_late": lambda seen: PARTICULAR["more_workers"] if _has_workers(seen) else None,
    "blocking_copy": _of_a_copy,
    "copy_not_overlapped": _of_a_copy,
    "host_sync": _of_a_sync,
    "allocator": _of_memory,
    "host_work": _of_work,
}
"""Of causes with more than one remedy, who chooses by what was seen; none where the usual one fits."""


_LESSONS = {
    Role.CHOOSES | Role.COUNTS: "only the GPU knows how many there are, so Python waits for it",
    Role.SYNCHRONIZES: "Python waits until all launched work is done",
    Role.READS: "Python needs a value, so it waits until the GPU has computed it",
}
"""What a reader should learn of a wait, by what the called operator does."""


def lesson(timeline: Timeline, cause: str, row: int) -> str:
    """Of a row in a script without steps, where a wait costs nothing now and would in a loop."""
    if cause == "host_sync":
        called = _role_of_call(timeline, row)
        told = (sentence for role, sentence in _LESSONS.items() if called & role)
        return next(told, "Python needs what the GPU computes, so it waits until that is done")
    return {
        "blocking_copy": "Python waits until all of it is copied",
        "copy_not_overlapped": "kernels that were launched after it wait until all of it is copied",
        "allocator": "memory is requested from the driver once and then kept",
    }.get(cause, "")


def what_happened(scene: Scene, finding: Finding) -> str:
    """A sentence with its counts. Durations are left to the report."""
    spans, of_a_rank = scene.timeline.spans, scene.steps * len(scene.timeline.ranks)
    copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
    count, said = finding.count / of_a_rank, SAID[finding.cause]
    per = "" if scene.timeline.facts.runs_once else " per iteration"
    return (said if isinstance(said, str) else said(scene, finding)).format(
        per=per,
        often=times(count, per),
        launches="1 launch" if round(count) == 1 else f"{count:,.0f} launches",
        moved=amount(float(spans.size[copies].sum()) / of_a_rank),
    )


def _copied(scene: Scene, finding: Finding) -> str:
    spans = scene.timeline.spans
    copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
    pageable = scene.timeline.facts.runs_once and not spans.pinned[copies].any()
    why = ": the memory is not pinned, so non_blocking=True changes nothing" if pageable else ""
    return f"{{moved}}{{per}} are copied while Python waits ({{often}}){why}."


def _waited_for_input(scene: Scene, finding: Finding) -> str:
    if not scene.by_workers.any():
        work, known = scene.timeline.spans.work, place_of(scene.timeline, int(finding.rows[0]))
        places = by_place(scene, np.flatnonzero((scene.loader_frame != NONE) & (work > 0)))
        place = max(places, key=lambda place: work[places[place]].sum())
        there = f", most of it at {place}," if place.file and str(place) != str(known) else ","
        return f"The training process prepares its own batches{there} and the GPU waits for them."
    waits = np.unique(scene.timeline.rank_of_rows[finding.rows]).tolist()
    if len(waits) < len(scene.timeline.ranks):
        return f"Rank {waits[0]} waits for its loader's workers, and the other ranks wait for rank {waits[0]}."
    return "The loop waits for the loader's workers, and the GPU waits for the loop."


def _came_late(scene: Scene, finding: Finding) -> str:
    late = sorted(one.rank for one in late_ranks(scene, finding))
    if not late:
        who = "Ranks come"
    elif len(late) == 1:
        who = f"Rank {late[0]} comes"
    elif len(late) <= 4:
        who = f"Ranks {', '.join(map(str, late[:-1]))} and {late[-1]} come"
    else:
        who = f"{len(late)} ranks come"
    if (scene.timeline.spans.meeting == NONE).all():
        return f"{who} late to the next collective, which was not recorded. The others wait there."
    return f"{who} late to the collectives, and the others wait there."


def _travelled(scene: Scene, finding: Finding) -> str:
    if finding.edit.drop[scene.timeline.on_device].any():
        return "The gradients are sent after every micro-batch, though only their sum is used ({often} too often)."
    if finding.edit.drop.any():
        return "Python waits for messages of other ranks, which are copied through CPU memory ({often})."
    return "Collectives ({often}) run after the computation, not while it runs."


SAID: dict[str, str | Callable[[Scene, Finding], str]] = {
    "host_sync": "Python blocks on the GPU {often}. The GPU then idles until Python has launched more work.",
    "blocking_copy": _copied,
    "copy_not_overlapped": "{moved}{per} are copied before the kernels, not while they run ({often}).",
    "input_late": _waited_for_input,
    "made_on_host": "A tensor is created on the CPU and then copied to the GPU ({often}).",
    "launch_bound": "{launches}{per}. The GPU finishes each before Python has launched the next.",
    "allocator": "PyTorch requests memory from the driver, or frees it, {often}. Some of these calls stop the GPU.",
    "host_work": "The training thread does other work between its launches, and the GPU is idle meanwhile.",
    "peer_late": _came_late,
    "exposed_collective": _travelled,
}


ROWS_NEARBY = 400
"""So many rows before and after one what stands beside it is looked for."""


def place_of(timeline: Timeline, row: int, frame: int = NONE) -> Where:
    """The user's own frame, with the library's beside it; without stacks the operator and what stands around it.

    Of a row within `frame`, the place of that frame.
    """
    chain = list(_frames_around(timeline, row) if frame == NONE else timeline.frames.around(frame))
    operator = _operator(timeline, row, chain) if frame == NONE else ""
    user, library = _user_frame(timeline, chain)
    if user is not None:
        return Where(*user, operator=operator, library=library)
    return Where(operator=operator, around=_surroundings(timeline, row, chain), library=library)


def _frames_around(timeline: Timeline, row: int) -> Iterator[int]:
    """From the inside out. On the backward thread it goes on where the forward part was called, else at the caller."""
    chain = list(timeline.frames.around(int(timeline.spans.frame[row])))
    yield from chain
    lane = timeline.spans.lane[row]
    main = int(timeline.spans.lane[timeline.marks_of(timeline.lanes[lane].rank)[0]])
    if lane != main and len(timeline.frames):
        forward = next(filter(None, (_forward_of(timeline, frame, main) for frame in chain)), None)
        frames, time = timeline.frames, timeline.spans.start[row]
        is_open = (frames.lane == main) & (frames.start <= time) & (frames.end > time)
        yield from forward or np.flatnonzero(is_open)[::-1].tolist()


def _forward_of(timeline: Timeline, frame: int, main: int) -> list[int]:
    """The frames around the forward operator that left this backward one to be done."""
    frames = timeline.frames
    if frames.sequence[frame] < 0:
        return []
    mine = (frames.sequence == frames.sequence[frame]) & (frames.lane == main) & (frames.start < frames.start[frame])
    return list(timeline.frames.around(int(np.flatnonzero(mine)[-1]))) if mine.any() else []


def _operator(timeline: Timeline, row: int, chain: list[int]) -> str:
    """The name of the operator that the program called; of no operator, that of the call itself."""
    names, frame = timeline.names, _called(timeline, chain)
    if frame != NONE:
        return names[timeline.frames.name[frame]]
    return names[timeline.spans.name[row]] if timeline.spans.kind[row] != Kind.WORK else ""


def _role_of_call(timeline: Timeline, row: int) -> int:
    """What the same does."""
    frame = _called(timeline, list(_frames_around(timeline, row)))
    return int(timeline.spans.role[row] if frame == NONE else timeline.frames.role[frame])


def _called(timeline: Timeline, chain: list[int]) -> int:
    """The outermost operator of the innermost run of operators: what the program called."""
    frames, found = timeline.frames, NONE
    for frame in chain:
        if frames.kind[frame] == FrameKind.OPERATOR and not frames.role[frame] & Role.BACKWARD:
            found = frame
        elif found != NONE:
            break
    return found


def _user_frame(timeline: Timeline, chain: list[int]) -> tuple[tuple[str, int, str, bool] | None, str]:
    frames, names, library = timeline.frames, timeline.names, ""
    for frame in chain:
        if frames.kind[frame] not in (FrameKind.PYTHON, FrameKind.LINE):
            continue
        line = source_line(names[frames.name[frame]])
        if line and frames.owner[frame] == Owner.USER:
            return (*line, bool(frames.kind[frame] == FrameKind.LINE)), library
        if line and not library:
            library = f"{line[0].removeprefix(INSTALLED)}:{line[1]} in {line[2]}"
    return None, library


def _surroundings(timeline: Timeline, row: int, chain: list[int]) -> str:
    """Without stacks: the annotation around the row, else the operators before and after it."""
    frames, names = timeline.frames, timeline.names
    for frame in chain:
        annotates = frames.kind[frame] == FrameKind.ANNOTATION and not _counts_steps(timeline, frame)
        if annotates and not frames.role[frame] & Role.INTERNAL:
            return f"in {names[frames.name[frame]]}"
    before, after = (_neighbour(timeline, row, step) for step in (-1, 1))
    called = _operator(timeline, row, chain)
    if before and after and not called:
        return f"between {before} and {after}"
    known = [f"after {before}" if before else "", f"before {after}" if after else ""]
    return ", ".join(filter(None, [called, *known]))


def _neighbour(timeline: Timeline, row: int, direction: int) -> str:
    """The nearest other operator on the lane that launched something."""
    spans, own = timeline.spans, _outermost(timeline, row)
    first = max(0, row - ROWS_NEARBY) if direction < 0 else row + 1
    near = slice(first, row if direction < 0 else first + ROWS_NEARBY)
    launches = np.flatnonzero((spans.lane[near] == spans.lane[row]) & (spans.kind[near] == Kind.LAUNCH)) + first
    around = (_outermost(timeline, other) for other in launches[::direction].tolist())
    frame = next((one for one in around if one not in (own, NONE)), NONE)
    return timeline.names[timeline.frames.name[frame]] if frame != NONE else ""


def _outermost(timeline: Timeline, row: int) -> int:
    """The outermost operator or annotation around a row."""
    chain = [*timeline.frames.around(int(timeline.spans.frame[row]))]
    kind, python = timeline.frames.kind, int(FrameKind.PYTHON)
    named = (frame for frame in reversed(chain) if kind[frame] != python and not _counts_steps(timeline, frame))
    return next(named, NONE)


def _counts_steps(timeline: Timeline, frame: int) -> bool:
    """It is around all of a step, with the step's number in its name: no place of the program."""
    return bool(timeline.frames.role[frame] & Role.STEP)


def by_place(scene: Scene, rows: Ints, cause: str = "") -> dict[Where, Ints]:
    """Rows by place. Rows reached along the same path of calls share one, so only one of them is looked up.

    What makes a rank late is where it leaves the path of the others, if it does; work that needs a value is where that
    is read; what the backward pass waits for because of a mask is where the mask is used.
    """
    spans, within = scene.timeline.spans, np.full(len(rows), NONE)
    if cause in ("peer_late", "host_work"):
        within = (scene.frame_of_one_rank if cause == "peer_late" else scene.needs_read)[rows]
    shown = scene.shown_at[rows]
    frame = np.where(within == NONE, spans.frame[shown], within)
    path = np.where(frame == NONE, spans.name[shown], scene.path[np.maximum(frame, 0)] if len(scene.path) else 0)
    _, first, which, count = np.unique(path, return_index=True, return_inverse=True, return_counts=True)
    groups = defaultdict[tuple[object, ...], list[Ints]](list)
    places: dict[tuple[object, ...], Where] = {}
    for index in np.lexsort((first, -count)).tolist():  # of equal ones first what came first
        place = place_of(scene.timeline, int(shown[first[index]]), int(within[first[index]]))
        # one line of the program is one place, whichever operators it calls
        key = (place.file, place.line, place.function) if place.file else (place.around or place.operator,)
        places.setdefault(key, place)
        groups[key].append(rows[which == index])
    return {places[key]: np.concatenate(parts) for key, parts in groups.items()}


def places_of(scene: Scene, finding: Finding) -> dict[Where, Ints]:
    """Its rows to blame by place, first the place whose rows hold up longest: a cheap measure, good enough to choose
    which places to replay."""
    spans, blamed = scene.timeline.spans, finding.culprit != NONE
    took = np.bincount(finding.culprit[blamed], (spans.end - spans.start)[blamed], len(spans))
    places = by_place(scene, finding.rows, finding.cause)
    return dict(sorted(places.items(), key=lambda one: -took[one[1]].sum()))


WORTH_NAMING = 0.2
"""Ranks that are late by less than this share of the latest one are not worth a line."""


def late_ranks(scene: Scene, finding: Finding) -> tuple[LateRank, ...]:
    """Which ranks come late, by how much, and what they do meanwhile; the latest first."""
    excess = np.where(finding.culprit >= 0, finding.edit.saves(scene.timeline.spans.work), 0)
    rank = scene.timeline.rank_of_rows
    late = np.intersect1d(rank[finding.rows], rank[np.flatnonzero(excess)]).tolist()
    found = [_late(scene, finding, one, np.where(rank == one, excess, 0)) for one in late]
    latest = max((one.late for one in found), default=0)
    return tuple(sorted((one for one in found if one.late >= WORTH_NAMING * latest), key=lambda one: -one.late))


def _late(scene: Scene, finding: Finding, rank: int, excess: Ints) -> LateRank:
    """The place that loses most, were its rank like the others."""
    rows = np.flatnonzero(excess)
    on_device = scene.timeline.on_device[rows]
    computing = excess[rows[on_device]].sum() > excess[rows[~on_device]].sum()
    rows = rows[on_device == computing]
    hosts = finding.culprit[rows]
    of_host = np.bincount(hosts, excess[rows], len(excess))
    places = by_place(scene, np.unique(hosts), "peer_late")
    worst = max(places, key=lambda place: of_host[places[place]].sum())
    ranks, late = len(scene.timeline.ranks), excess[rows].sum() / scene.steps
    if computing:  # it would keep its share of what it does beyond the others
        return LateRank(rank, int(late * ranks / (ranks - 1)), "computing", worst)
    return LateRank(rank, int(late), "host_work", worst)


def places_of_rows(timeline: Timeline) -> tuple[tuple[Where, ...], Ints, Ints]:
    """Of each row the user's line around it and what was called there, each frame looked at once."""
    frames, spans = timeline.frames, timeline.spans
    needed = np.zeros(len(frames) + 1, bool)
    up = np.unique(spans.frame)
    while len(up := up[up != NONE]):
        needed[up] = True
        up = np.unique(frames.parent[up])
    rows = np.flatnonzero(needed[:-1])
    operator = (frames.kind == FrameKind.OPERATOR) & (frames.role & Role.BACKWARD == 0)
    # which frames are lines or functions of the user's own; one more place for no frame
    mine = np.isin(frames.kind, (FrameKind.PYTHON, FrameKind.LINE)) & (frames.owner == Owner.USER)
    line = np.append(mine, False)
    user, called = np.full(len(frames) + 1, NONE, np.int64), np.full(len(frames) + 1, NONE, np.int64)
    parents, names = frames.parent.tolist(), frames.name.tolist()
    for frame in rows.tolist():
        parent = parents[frame]
        user[frame] = frame if line[frame] else user[parent]
        # the outermost operator of the innermost run of operators is what the program called
        begins = operator[frame] and (parent == NONE or not operator[parent])
        called[frame] = names[frame] if begins else called[parent]
    user[rows] = _lines_of_forward(timeline, rows, user[rows], line)
    number: dict[Where, int] = {}
    of_frame = np.full(len(frames) + 1, NONE, np.int64)
    for frame in np.unique(user[user != NONE]).tolist():
        of_frame[frame] = number.setdefault(_place_of_frame(timeline, frame), len(number))
    place, call = of_frame[user[spans.frame]], called[spans.frame]
    place = _at_the_same_time(timeline, place, line, of_frame, number)
    return tuple(number), place, call


def _lines_of_forward(timeline: Timeline, rows: Ints, user: Ints, line: Mask) -> Ints:
    """Of frames of the backward pass without a line: that of the forward operator which left it to be done."""
    frames = timeline.frames
    numbered = np.flatnonzero(frames.sequence >= 0)
    mains = _main_lanes(timeline)
    forward = numbered[np.isin(frames.lane[numbered], list(mains.values()))]
    forward = forward[np.argsort(frames.sequence[forward], kind="stable")]
    known = dict(zip(frames.sequence[forward].tolist(), forward.tolist(), strict=True))  # of several, the last one
    found = user.copy()
    for place in np.flatnonzero(user == NONE).tolist():
        numbers = (int(frames.sequence[one]) for one in frames.around(int(rows[place])))
        operator = next((known[number] for number in numbers if number in known), NONE)
        found[place] = next((one for one in frames.around(operator) if line[one]), NONE)
    return found


def _main_lanes(timeline: Timeline) -> Mapping[int, int]:
    """Of each rank, the lane on which its turns begin."""
    marks = timeline.marks
    lanes = timeline.spans.lane[marks].tolist()
    return {timeline.lanes[lane].rank: lane for lane in reversed(lanes)}


def _at_the_same_time(timeline: Timeline, place: Ints, line: Mask, of_frame: Ints, number: dict[Where, int]) -> Ints:
    """Rows of other host threads that have no line: what the main thread stood at when they began."""
    spans, frames, found = timeline.spans, timeline.frames, place.copy()
    host = ~timeline.on_device & (place == NONE)
    for rank, main in _main_lanes(timeline).items():
        rows = np.flatnonzero(host & (timeline.rank_of_rows == rank) & (spans.lane != main))
        mine = np.flatnonzero(line[:-1] & (frames.lane == main))
        mine = mine[np.argsort(frames.start[mine], kind="stable")]
        if not len(rows) or not len(mine):
            continue
        at = np.searchsorted(frames.start[mine], spans.start[rows], side="right") - 1
        frame = np.where(at >= 0, mine[np.maximum(at, 0)], NONE)
        for _ in range(64):  # from the innermost that began before, out to one that is still open
            closed = (frame != NONE) & ((frames.end[frame] <= spans.start[rows]) | ~line[frame])
            if not closed.any():
                break
            frame = np.where(closed, frames.parent[frame], frame)
        for one in np.unique(frame[frame != NONE]).tolist():
            of_frame[one] = number.setdefault(_place_of_frame(timeline, one), len(number))
        found[rows] = of_frame[frame]
    return found


def _place_of_frame(timeline: Timeline, frame: int) -> Where:
    file, at, function = source_line(timeline.names[timeline.frames.name[frame]]) or ("", 0, "")
    return Where(file, at, function, exact=bool(timeline.frames.kind[frame] == FrameKind.LINE))
