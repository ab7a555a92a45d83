"""Tensors that are created on the CPU only to be copied to the GPU."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import PRICE_OF_A_CALL, CauseInputs
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, FrameKind, Ints, Kind


class MadeOnHost(CauseKind):
    """Drawn or filled on the host, at most transformed elementwise, and sent to the device at once."""

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
        copies = np.flatnonzero(
            inputs.is_copy & (spans.direction == Direction.HOST_TO_DEVICE) & (spans.size > STAGED_BYTES)
        )
        for copy in copies[inputs.launch[copies] != NONE].tolist():
            made = _making(inputs, int(inputs.launch[copy]))
            if len(made):
                launch, sync = int(inputs.launch[copy]), int(inputs.sync_of_copy[copy])
                leaves = np.array([*made, launch, copy, *([sync] if sync != NONE else [])], np.int64)
                builder.edit.drop[leaves] = True
                builder.culprit[leaves] = launch


def _making(inputs: CauseInputs, launch: int) -> Ints:
    """The rows before this launch in which its tensor was made; none if anything but making went on there. What Python
    itself does at the line of the launch comes with any call."""
    spans, frames, lane = inputs.timeline.spans, inputs.timeline.frames, inputs.timeline.spans.lane[launch]

    def called(row: int) -> tuple[int, int]:
        """What the innermost operator does, and the name of the line; NONE where there is none."""
        around = [*frames.around(int(spans.frame[row]))]
        role = next((int(frames.role[one]) for one in around if frames.kind[one] == FrameKind.OPERATOR), NONE)
        return role, next((int(frames.name[one]) for one in around if frames.kind[one] != FrameKind.OPERATOR), NONE)

    _, line = called(launch)
    rows: list[int] = []
    row, makes = int(inputs.before[launch]), False
    while row != NONE and spans.kind[row] in (Kind.WORK, Kind.ALLOCATE) and spans.lane[row] == lane:
        role, at = called(row)
        if spans.work[row] >= PRICE_OF_A_CALL and (role != NONE or at != line or line == NONE):
            if role == NONE or not role & (Role.MAKES | Role.SHAPES):
                break
            makes |= bool(role & Role.MAKES)
            rows.append(row)
        row = int(inputs.before[row])
    return np.array(rows if makes else [], np.int64)
