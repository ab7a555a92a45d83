"""What happened, in a sentence with its counts. Durations are left to the report."""

from __future__ import annotations

from collections.abc import Callable

from keepbusy.explain.fixes.finding import Finding
from keepbusy.explain.scene import Scene
from keepbusy.timeline.model import Kind


def what_happened(scene: Scene, finding: Finding) -> str:
    return _SENTENCES[finding.cause](scene, finding)


def times(count: float) -> str:
    """Once, twice, 12 times a step."""
    if count < 0.95:
        return f"once in {round(1 / max(count, 1e-3))} steps"
    rounded = round(count)
    return {1: "once a step", 2: "twice a step"}.get(rounded, f"{rounded} times a step")


def _count(scene: Scene, finding: Finding) -> float:
    return len(finding.rows) / scene.steps / len(scene.timeline.ranks)


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


def _late(scene: Scene, finding: Finding) -> str:
    rank = scene.timeline.rank_of_rows[finding.rows]
    late = sorted({int(one) for one in rank})
    named = "rank " + ", ".join(map(str, late)) if len(late) <= 3 else f"{len(late)} ranks"
    return f"{named.capitalize()} comes late to the collectives in every step, and the others wait there."


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
    "peer_late": _late,
    "exposed_collective": _exposed,
}


def why_harmless(named: set[str], waiting_share: float) -> str:
    if waiting_share < 0.05:
        return "the GPU has work all the time"
    if "launch_bound" in named:
        return "the step is launch-bound: the host would not have been ahead anyway"
    return "something else holds the step up at the same time"
