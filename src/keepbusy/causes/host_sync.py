"""Python reads a value of the GPU, and waits until it is there."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.places import role_of_call
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, FrameKind, Ints

_LESSONS = {
    Role.CHOOSES | Role.COUNTS: "only the GPU knows how many there are, so Python waits for it",
    Role.SYNCHRONIZES: "Python waits until all launched work is done",
    Role.READS: "Python needs a value, so it waits until the GPU has computed it",
}
"""The sentence for each role of the operator that waits."""


class HostSync(CauseKind):
    """Reads of values, and other calls that return once the GPU has caught up."""

    place = LedgerPlace(
        name="host_sync",
        label="host sync",
        colour="#e06c62",
        sentence="Python blocks on the GPU, which then idles",
        happens=(
            "Python waits until the GPU has caught up: `.item()`, `.cpu()`, `if tensor:`, `nonzero`, a mask as an "
            "index, `torch.cuda.synchronize()`. Then the GPU is idle until Python launches something."
        ),
        fixed_by="Read later, less often, or not at all: [`keepbusy.readback`](../how-to/read-values.md).",
    )
    what = "Python blocks on the GPU {often}. The GPU then idles until Python has launched more work."
    lesson = "Python needs what the GPU computes, so it waits until that is done"

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        syncs = np.flatnonzero(inputs.is_sync & ~inputs.waits_for_large_copy)
        frame = inputs.outermost(inputs.frames_with(Role.READS))
        builder.edit.drop_wait[syncs] = True
        builder.edit.work[syncs] = 0
        builder.culprit[syncs] = syncs
        inside = np.flatnonzero((frame != NONE) & ~inputs.timeline.on_device)
        culprit = _sync_of_frame(frame, syncs)[frame[inside]]
        inside, culprit = inside[culprit != NONE], culprit[culprit != NONE]
        builder.edit.work[inside] = 0
        builder.culprit[inside] = culprit
        _send_no_objects(inputs, builder, syncs)
        _read_together(inputs, builder)
        builder.count = len(syncs)

    def lesson_at(self, inputs: CauseInputs, row: int) -> str:
        called = role_of_call(inputs.timeline, row)
        return next((sentence for role, sentence in _LESSONS.items() if called & role), self.lesson)


def _send_no_objects(inputs: CauseInputs, builder: FindingBuilder, syncs: Ints) -> None:
    """Objects are sent as a length and bytes, each copied, sent and read: without the call all of that disappears. If
    lines were recorded, each line of the call is a frame, and the enclosing frame shows that they are one call."""
    frames, call = inputs.timeline.frames, inputs.outermost(inputs.frames_with(Role.OBJECTS))
    is_line = (call != NONE) & (np.append(frames.kind, FrameKind.PYTHON)[call] == FrameKind.LINE)
    around = np.append(frames.parent, NONE)[call]
    call = np.where(is_line & (around != NONE), around, call)
    inside = np.flatnonzero(call != NONE)
    first = _sync_of_frame(call, syncs)[call[inside]]
    inside, first = inside[first != NONE], first[first != NONE]
    builder.edit.drop[inside] = True
    builder.culprit[inside] = first
    commands = np.flatnonzero((inputs.launch != NONE) & builder.edit.drop[inputs.launch])
    builder.edit.drop[commands] = True
    builder.culprit[commands] = builder.culprit[inputs.launch[commands]]


def _read_together(inputs: CauseInputs, builder: FindingBuilder) -> None:
    """A program that reads a loop's values together computes them together, which takes what one of them took."""
    for rows in inputs.reads_in_a_row:
        builder.edit.work[rows[1:-1]] = 0
        builder.culprit[rows[1:-1]] = rows[0]
        builder.culprit[np.isin(builder.culprit, rows)] = rows[0]


def _sync_of_frame(frame: Ints, syncs: Ints) -> Ints:
    """For each frame, the first sync within it, or NONE. The last entry makes the index NONE yield NONE."""
    result = np.full(int(frame.max(initial=0)) + 2, NONE, np.int64)
    within = syncs[frame[syncs] != NONE]
    result[frame[within][::-1]] = within[::-1]
    return result
