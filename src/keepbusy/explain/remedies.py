"""For each cause what happened, in a sentence, and what to do about it: a fix's name, a sentence and a line of code."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keepbusy.explain.causes.host import loader_frame, of_large_copy
from keepbusy.explain.diagnosis import Where
from keepbusy.explain.edit import Finding, SideLane
from keepbusy.explain.places import by_place, late_ranks, where
from keepbusy.explain.scene import STAGED_BYTES, Scene
from keepbusy.timeline.frame_roles import DDP_FORWARD, Role
from keepbusy.timeline.model import NONE, Direction, FrameKind, Ints, Kind


class Remedy(NamedTuple):
    """What to do about a cause."""

    fix: str
    advice: str
    code: str = ""
    api: str = ""


_TABLES = tomllib.loads(Path(__file__).with_name("remedies.toml").read_text(encoding="utf-8"))
REMEDIES = {cause: Remedy(**told) for cause, told in _TABLES["usual"].items()}
"""By cause, where nothing more particular was seen."""
PARTICULAR = {name: Remedy(**told) for name, told in _TABLES["particular"].items()}
SYNCS = {
    r"(?<!is_)nonzero|index|Index|masked_select|argwhere": "keep_shapes",
    "repeat_interleave": "tell_output_size",
    "unique|bincount": "tell_sizes",
    "Synchronize": "drop_sync",
}
"""Of a read, by what was called."""


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
    if _writes(seen):
        return PARTICULAR["checkpoint"]
    if (loader_frame(seen.scene)[seen.rows] != NONE).all():
        return PARTICULAR["late_loader"]
    return PARTICULAR["one_for_all"] if (seen.scene.frame_of_one_rank[seen.rows] != NONE).all() else None


def _of_launches(seen: PlacedCause) -> Remedy | None:
    """What would take them away has its price, which a script that runs once never earns back."""
    facts, why = seen.scene.timeline.facts, _no_graph_because(seen.scene)
    if facts.runs_once:
        return PARTICULAR["launched_once"]
    if (seen.scene.timeline.spans.kind == Kind.COLLECTIVE).any():
        return PARTICULAR["compiled_among_ranks"]
    compiled = PARTICULAR["compiled"]
    return compiled._replace(advice=compiled.advice.format(why=why)) if why else None


def _no_graph_because(scene: Scene) -> str:
    """Why no graph can hold the whole step. One place of waiting a step may be its end: that one is no obstacle. Nor is
    what few steps launch beyond all others, as a loss that is printed now and then: it stays outside."""
    if len(np.unique(scene.last_launch[scene.is_sync & ~of_large_copy(scene)])) > scene.steps:
        return "it reads values of the GPU in its middle"
    timeline, spans = scene.timeline, scene.timeline.spans
    # a graph launches the same kernels on as much data each time; on a virtual GPU as much takes as long, exactly
    amount = spans.work if timeline.facts.virtual else spans.blocks
    rows = np.flatnonzero(scene.launch != NONE)
    rows = rows[np.argsort(scene.launch[rows], kind="stable")]
    launched = np.stack([spans.name[rows], spans.size[rows], amount[rows]])
    edges = np.searchsorted(scene.launch[rows], timeline.marks)
    alike = Counter(one.tobytes() for one in np.split(launched, edges, axis=1)[1:])
    return "" if 2 * max(alike.values()) > alike.total() else "its steps differ in what they launch"


def _of_a_copy(seen: PlacedCause) -> Remedy | None:
    """What goes to the host is none of a batch that could be fetched ahead, nor are shards that FSDP keeps there."""
    if seen.scene.within(Role.SHARDS)[seen.rows].all():
        return PARTICULAR["offloaded"]
    spans, runs_once = seen.scene.timeline.spans, seen.scene.timeline.facts.runs_once
    copies = seen.scene.is_copy & np.isin(seen.finding.culprit, seen.rows)
    back = copies & (spans.direction == Direction.DEVICE_TO_HOST)
    if seen.finding.cause == "copy_not_overlapped":
        return PARTICULAR["beside"] if back.sum() == copies.sum() or runs_once else None
    if spans.work[back].sum() > spans.work[copies & ~back].sum():
        return PARTICULAR["checkpoint" if _writes(seen) else "copy_back_later"]
    if spans.size[copies].max(initial=0) <= STAGED_BYTES:
        return PARTICULAR["keep_on_device"]
    is_pinned = spans.pinned[copies].all()  # from there nobody waits but who asks to
    return PARTICULAR["drop_sync" if is_pinned else "pinned"] if runs_once else None


def _of_a_sync(seen: PlacedCause) -> Remedy | None:
    if _writes(seen):
        return PARTICULAR["checkpoint"]
    if seen.finding.edit.drop.any() and seen.finding.edit.drop[seen.rows].any():
        return PARTICULAR["send_tensors"]
    if "grad_scaler" in seen.where.library:
        return PARTICULAR["scaler"]
    called, run = seen.where.operator, seen.scene.timeline.facts.run
    known = next((PARTICULAR[name] for pattern, name in SYNCS.items() if re.search(pattern, called)), None)
    return known or (PARTICULAR["decided_here"] if run is not None and str(seen.where) in run.decides else None)


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
    frames, names = scene.timeline.frames, scene.timeline.names
    frame = int(scene.timeline.spans.frame[row])
    broadcasts = frame != NONE and "broadcast" in names[frames.name[frame]]
    while broadcasts and frame != NONE and frames.kind[frame] != FrameKind.PYTHON:
        if names[frames.name[frame]] == DDP_FORWARD:
            return True
        frame = int(frames.parent[frame])
    return False


def _before_the_gradients(scene: Scene, row: int) -> bool:
    """Whether a backward pass is still to come in its step, or to be finished; so it is also where there is none."""
    timeline = scene.timeline
    mine = timeline.rank_of_rows == timeline.rank_of_rows[row]
    backward = mine & scene.within(Role.BACKWARD)
    marks = np.append(timeline.marks[mine[timeline.marks]], len(timeline))
    return bool(backward[row : marks[np.searchsorted(marks, row, side="right")]].any()) or not backward.any()


def _of_work(seen: PlacedCause) -> Remedy | None:
    """Not all that holds Python up is work of the program's own, nor can all of it go on beside the GPU."""
    if _writes(seen):
        return PARTICULAR["checkpoint"]
    if _prepares(seen):
        return PARTICULAR["pad_lengths"]
    if _collects(seen):
        return PARTICULAR["collect_between"]
    if _steps_offloaded(seen):
        return PARTICULAR["offloaded"]
    return PARTICULAR["needs_the_value"] if (seen.scene.needs_read[seen.rows] != NONE).all() else None


def _prepares(seen: PlacedCause) -> bool:
    """Whether it is PyTorch that works, before it launches a kernel: cuDNN looks for one whenever a shape is new."""
    scene, frame = seen.scene, seen.scene.timeline.spans.frame[seen.rows]
    work = scene.timeline.spans.work[seen.rows]
    layers = np.append(scene.frames_with(Role.LAYER) & ~scene.launch_free, False)
    return bool(2 * work[layers[frame]].sum() > work.sum())


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


def _writes(seen: PlacedCause) -> bool:
    return "serialization" in seen.where.library


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
    "input_late": lambda seen: PARTICULAR["more_workers"] if "_MultiProcessing" in seen.where.operator else None,
    "blocking_copy": _of_a_copy,
    "copy_not_overlapped": _of_a_copy,
    "host_sync": _of_a_sync,
    "host_work": _of_work,
}
"""Of causes with more than one remedy, who chooses by what was seen; none where the usual one fits."""


LESSONS = (
    ("nonzero|index|masked_select|unique|where", "how many there are is known only to the GPU, so Python waits for it"),
    ("Synchronize", "Python waits until all that was launched is done"),
    ("item|_local_scalar_dense|is_nonzero|equal", "Python needs a value, so it waits until the GPU has computed it"),
)
"""What a reader should learn of a wait, by what was called."""


def lesson(cause: str, where: Where) -> str:
    """Of a line in a script without steps, where a wait costs nothing now and would in a loop."""
    if cause == "host_sync":
        told = (sentence for pattern, sentence in LESSONS if re.search(pattern, where.operator))
        return next(told, "Python needs what the GPU computes, so it waits until that is done")
    return {
        "blocking_copy": "Python waits until all of it is copied",
        "copy_not_overlapped": "kernels that were launched after it wait until all of it is copied",
        "allocator": "memory is requested from the driver once, and kept for the next time",
    }.get(cause, "")


def what_happened(scene: Scene, finding: Finding) -> str:
    """A sentence with its counts. Durations are left to the report."""
    spans, of_a_rank = scene.timeline.spans, scene.steps * len(scene.timeline.ranks)
    copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
    count, said = finding.count / of_a_rank, SAID[finding.cause]
    return (said if isinstance(said, str) else said(scene, finding)).format(
        often=times(count),
        launches="1 launch" if round(count) == 1 else f"{count:,.0f} launches",
        moved=_bytes(float(spans.size[copies].sum()) / of_a_rank),
    )


def _copied(scene: Scene, finding: Finding) -> str:
    spans = scene.timeline.spans
    copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
    pageable = scene.timeline.facts.runs_once and not spans.pinned[copies].any()
    why = ": the memory is not pinned, so non_blocking=True changes nothing" if pageable else ""
    return f"{{moved}} a step are copied while Python waits ({{often}}){why}."


def _waited_for_input(scene: Scene, finding: Finding) -> str:
    if not scene.by_workers.any():
        work, known = scene.timeline.spans.work, where(scene.timeline, int(finding.rows[0]))
        places = by_place(scene, np.flatnonzero((loader_frame(scene) != NONE) & (work > 0)))
        place = max(places, key=lambda place: work[places[place]].sum())
        there = f", most of it at {place}," if place.file and str(place) != str(known) else ","
        return f"The training process prepares its own batches{there} and the GPU waits for them."
    waits = np.unique(scene.timeline.rank_of_rows[finding.rows]).tolist()
    if len(waits) < len(scene.timeline.ranks):
        return f"Rank {waits[0]} waits for its loader's workers, and the other ranks wait for it."
    return "The loop waits for the loader's workers, and the GPU waits for the loop."


def _came_late(scene: Scene, finding: Finding) -> str:
    late = sorted(one.rank for one in late_ranks(scene, finding))
    if len(late) == 1:
        who = f"Rank {late[0]} comes"
    elif len(late) <= 4:
        who = f"Ranks {', '.join(map(str, late[:-1]))} and {late[-1]} come"
    else:
        who = f"{len(late)} ranks come"
    if (scene.timeline.spans.meeting == NONE).all():
        return f"{who} late to wherever ranks meet next, which no recorded turn holds: the others wait there."
    return f"{who} late to the collectives, and the others wait there."


def _travelled(scene: Scene, finding: Finding) -> str:
    if finding.edit.drop[scene.timeline.on_device].any():
        return "The gradients travel after every micro-batch, though only their sum is used ({often} too often)."
    if finding.edit.drop.any():
        return "Python waits for messages of other ranks, which come through the host's memory ({often})."
    return "Collectives ({often}) run after the computation instead of beside it."


SAID: dict[str, str | Callable[[Scene, Finding], str]] = {
    "host_sync": "Python waits for the GPU {often}, and then the GPU has nothing to do until Python has launched more.",
    "blocking_copy": _copied,
    "copy_not_overlapped": "{moved} a step are copied before the kernels instead of beside them ({often}).",
    "input_late": _waited_for_input,
    "made_on_host": "A tensor is made on the CPU and then copied to the GPU ({often}).",
    "launch_bound": "{launches} a step: the GPU is done with each before Python has launched the next.",
    "allocator": "PyTorch asks the driver for memory, or gives it back, {often}; some of these calls stop the GPU.",
    "host_work": "The training thread does other work between its launches, and the GPU has nothing to do meanwhile.",
    "peer_late": _came_late,
    "exposed_collective": _travelled,
}


def times(count: float) -> str:
    """Once, twice, 12 times a step."""
    if count < 2 / 3:
        return f"once in {round(1 / max(count, 1e-3))} steps"
    rounded = round(count)
    return {1: "once a step", 2: "twice a step"}.get(rounded, f"{rounded} times a step")


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
