"""From a row to the place in the user's program, no more exactly than the recording knows it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import numpy as np

from keepbusy.explain.diagnosis import Where
from keepbusy.timeline.model import NONE, FrameKind, Kind, Timeline

_PYTHON = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_PACKAGES = frozenset(
    [
        "torch",
        "torchvision",
        "torchaudio",
        "torchdata",
        "torchmetrics",
        "triton",
        "numpy",
        "transformers",
        "accelerate",
        "datasets",
        "tokenizers",
        "peft",
        "diffusers",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "deepspeed",
        "megatron",
        "composer",
        "timm",
        "fairscale",
        "apex",
        "xformers",
        "flash_attn",
        "einops",
        "PIL",
        "cv2",
        "tqdm",
        "wandb",
        "sklearn",
        "scipy",
        "pandas",
        "ignite",
        "torchtnt",
        "torch_geometric",
        "keepbusy",
    ]
)
_INNER = ("nccl:", "DistributedDataParallel.", "autograd::")
"""Annotations that PyTorch makes for itself: no place of the user's."""
_FOREIGN = re.compile(r"(^|/)(site-packages|dist-packages)/|^<|(^|/)lib/python\d")


def where(timeline: Timeline, row: int, frame: int = NONE) -> Where:
    """The user's own frame, with the library's beside it; without stacks the operator and what stands around it.

    Of a row within `frame`, the place of that frame.
    """
    chain = list(_frames_around(timeline, row) if frame == NONE else _ancestors(timeline, frame))
    operator = _operator(timeline, row, chain) if frame == NONE else ""
    user, library = _user_frame(timeline, chain)
    if user is not None:
        return Where(*user, operator=operator, library=library)
    return Where(operator=operator, around=_surroundings(timeline, row, chain), library=library)


def _frames_around(timeline: Timeline, row: int) -> Iterator[int]:
    """From the inside out. On the backward thread it goes on where the forward part was called, else at the caller."""
    chain = list(_ancestors(timeline, int(timeline.spans.frame[row])))
    yield from chain
    lane = timeline.spans.lane[row]
    main = int(timeline.spans.lane[timeline.marks_of(timeline.lanes[lane].rank)[0]])
    if lane != main and len(timeline.frames):
        forward = next(filter(None, (_forward_of(timeline, frame, main) for frame in chain)), None)
        yield from forward or _open_at(timeline, main, int(timeline.spans.start[row]))


def _ancestors(timeline: Timeline, frame: int) -> Iterator[int]:
    while frame != NONE:
        yield frame
        frame = int(timeline.frames.parent[frame])


def _forward_of(timeline: Timeline, frame: int, main: int) -> list[int]:
    """The frames around the forward operator that left this backward one to be done."""
    frames = timeline.frames
    if frames.sequence[frame] < 0:
        return []
    mine = (frames.sequence == frames.sequence[frame]) & (frames.lane == main) & (frames.start < frames.start[frame])
    return list(_ancestors(timeline, int(np.flatnonzero(mine)[-1]))) if mine.any() else []


def _open_at(timeline: Timeline, lane: int, time: int) -> Iterator[int]:
    frames = timeline.frames
    is_open = (frames.lane == lane) & (frames.start <= time) & (frames.end > time)
    yield from np.flatnonzero(is_open)[::-1].tolist()


def _operator(timeline: Timeline, row: int, chain: list[int]) -> str:
    """The outermost operator of the innermost run of operators: what the program called."""
    frames, names = timeline.frames, timeline.names
    found = ""
    for frame in chain:
        if frames.kind[frame] == FrameKind.OPERATOR and not names[frames.name[frame]].startswith("autograd::"):
            found = names[frames.name[frame]]
        elif found:
            break
    return found or (names[timeline.spans.name[row]] if timeline.spans.kind[row] != Kind.WORK else "")


def _user_frame(timeline: Timeline, chain: list[int]) -> tuple[tuple[str, int, str, bool] | None, str]:
    frames, names, library = timeline.frames, timeline.names, ""
    for frame in chain:
        if frames.kind[frame] not in (FrameKind.PYTHON, FrameKind.LINE):
            continue
        found = _PYTHON.match(names[frames.name[frame]])
        if not found:
            continue
        if is_library(found["file"]):
            library = library or f"{found['file']}:{found['line']} in {found['function']}"
        else:
            exact = frames.kind[frame] == FrameKind.LINE
            return (found["file"], int(found["line"]), found["function"], bool(exact)), library
    return None, library


def is_library(file: str) -> bool:
    top = file.split("/", 1)[0].removesuffix(".py")
    return bool(_FOREIGN.search(file)) or top in _PACKAGES or top in sys.stdlib_module_names


def _surroundings(timeline: Timeline, row: int, chain: list[int]) -> str:
    """Without stacks: the annotation around the row, else the operators before and after it."""
    frames, names = timeline.frames, timeline.names
    for frame in chain:
        if frames.kind[frame] == FrameKind.ANNOTATION and not names[frames.name[frame]].startswith(_INNER):
            return f"in {names[frames.name[frame]]}"
    before, after = (_neighbour(timeline, row, step) for step in (-1, 1))
    called = _operator(timeline, row, chain)
    if before and after and not called:
        return f"between {before} and {after}"
    known = [f"after {before}" if before else "", f"before {after}" if after else ""]
    return ", ".join(filter(None, [called, *known]))


def _neighbour(timeline: Timeline, row: int, direction: int) -> str:
    """The nearest other operator on the lane that launched something."""
    spans, frames, names = timeline.spans, timeline.frames, timeline.names
    own, lane = _outermost(timeline, row), spans.lane[row]
    other = row + direction
    for _ in range(400):
        if not 0 <= other < len(spans):
            break
        if spans.lane[other] == lane and spans.kind[other] == Kind.LAUNCH:
            frame = _outermost(timeline, other)
            if frame not in (own, NONE):
                return names[frames.name[frame]]
        other += direction
    return ""


def _outermost(timeline: Timeline, row: int) -> int:
    """The outermost operator or annotation around a row."""
    frames, frame, found = timeline.frames, int(timeline.spans.frame[row]), NONE
    while frame != NONE:
        found = frame if frames.kind[frame] != FrameKind.PYTHON else found
        frame = int(frames.parent[frame])
    return found
