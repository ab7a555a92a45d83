"""Tensors that are created on the CPU only to be copied to the GPU."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import PRICE_OF_A_CALL, CauseInputs
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, FrameKind, Ints, Kind


class MadeOnHost(CauseKind):
    """Tensors drawn or filled on the host, at most transformed elementwise, and sent to the device at once."""

    place = LedgerPlace(
        name="made_on_host",
        label="made on host",
        colour="#e288b0",
        sentence="Tensors are created on the CPU and copied to the GPU",
        happens='A tensor is created on the CPU and copied to the GPU: `torch.randn(…).to("cuda")`.',
        fixed_by='Create it on the GPU: `torch.randn(…, device="cuda")`.',
    )
    what = "A tensor is created on the CPU and then copied to the GPU ({often})."

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        spans = inputs.timeline.spans
        is_inbound = inputs.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (spans.size > STAGED_BYTES)
        for copy in np.flatnonzero(is_inbound & (inputs.launch != NONE)).tolist():
            launch, sync = int(inputs.launch[copy]), int(inputs.sync_of_copy[copy])
            rows = making_rows(inputs, launch)
            if len(rows):
                dropped_rows = np.array([*rows, launch, copy, *([sync] if sync != NONE else [])], np.int64)
                builder.edit.drop[dropped_rows] = True
                builder.culprit[dropped_rows] = launch


def making_rows(inputs: CauseInputs, launch: int) -> Ints:
    """The rows before this launch in which its tensor was created; none if there is any other work among them. Python's
    own work at the line of the launch does not count, since any call has some."""
    spans, frames, lane = inputs.timeline.spans, inputs.timeline.frames, inputs.timeline.spans.lane[launch]

    def called(row: int) -> tuple[int, int]:
        """The role of the innermost operator, and the name of the innermost line; NONE if there is none."""
        enclosing = [*frames.around(int(spans.frame[row]))]
        operators = [frame for frame in enclosing if frames.kind[frame] == FrameKind.OPERATOR]
        lines = [frame for frame in enclosing if frames.kind[frame] != FrameKind.OPERATOR]
        role = int(frames.role[operators[0]]) if operators else NONE
        return role, int(frames.name[lines[0]]) if lines else NONE

    _, line = called(launch)
    rows: list[int] = []
    row, makes = int(inputs.before[launch]), False
    while row != NONE and spans.kind[row] in (Kind.WORK, Kind.ALLOCATE) and spans.lane[row] == lane:
        role, line_of_row = called(row)
        if spans.work[row] >= PRICE_OF_A_CALL and (role != NONE or line_of_row != line or line == NONE):
            if role == NONE or not role & (Role.MAKES | Role.SHAPES):
                break
            makes |= bool(role & Role.MAKES)
            rows.append(row)
        row = int(inputs.before[row])
    return np.array(rows if makes else [], np.int64)
