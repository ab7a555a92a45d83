"""Copies between CPU and GPU memory for which something waits."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, Finding, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.timeline.edit import SideLane
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, Kind

USUAL_BANDWIDTH = 24.0
"""Bytes a nanosecond, from pinned memory over a link of unknown kind: PCIe 4."""
SETUP = 2_000


class BlockingCopy(CauseKind):
    """Copies from or to pageable memory, and copies that are waited for at once."""

    place = LedgerPlace(
        name="blocking_copy",
        label="blocking copy",
        colour="#e69a4c",
        sentence="Python waits for copies to finish",
        happens=(
            "A copy from or to pageable memory. The driver stages it at a sixth of the speed of pinned memory, and "
            "the GPU waits for all of it."
        ),
        fixed_by="[Prefetch batches](../how-to/prefetch.md): pinned memory, one copy, overlapped with computing.",
    )
    lesson = "Python waits until all of it is copied"

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        spans = inputs.timeline.spans
        # all copies to the GPU, and large ones from it: a small one is a read
        inbound = spans.direction == Direction.HOST_TO_DEVICE
        outbound = (spans.direction == Direction.DEVICE_TO_HOST) & (spans.size > STAGED_BYTES)
        copies = np.flatnonzero(inputs.is_copy & (inputs.sync_of_copy != NONE) & (inbound | outbound))
        builder.edit.lane[copies] = np.where(inbound[copies], SideLane.FETCH, SideLane.RETURN)
        if len(copies):
            bandwidth = inputs.timeline.facts.pinned_bandwidth or USUAL_BANDWIDTH
            pinned = (spans.size[copies] / bandwidth + SETUP).astype(np.int64)
            builder.edit.work[copies] = np.minimum(spans.work[copies], pinned)
        builder.culprit[copies] = inputs.sync_of_copy[copies]
        syncs = np.flatnonzero(np.isin(inputs.copy_of_sync, copies))  # the copying call itself, or a sync after it
        builder.edit.drop_wait[syncs] = True
        builder.edit.work[syncs] = 0
        builder.culprit[syncs] = inputs.sync_of_copy[inputs.copy_of_sync[syncs]]

    def what_happened(self, inputs: CauseInputs, finding: Finding) -> str:
        spans = inputs.timeline.spans
        copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
        pageable = inputs.timeline.facts.runs_once and not spans.pinned[copies].any()
        reason = ": the memory is not pinned, so non_blocking=True changes nothing" if pageable else ""
        return f"{{moved}}{{per}} are copied while Python waits ({{often}}){reason}."


class CopyNotOverlapped(CauseKind):
    """Asynchronous copies for which computing waits: on its own stream, or on one that it waits for at once."""

    place = LedgerPlace(
        name="copy_not_overlapped",
        label="copy not overlapped",
        colour="#d8bb55",
        sentence="Copies do not overlap with computing",
        happens="The copy is pinned and does not block the CPU, but it is in the stream that computes.",
        fixed_by="[Prefetch batches](../how-to/prefetch.md), on a separate stream.",
    )
    what = "{moved}{per} are copied before the kernels, not while they run ({often})."
    lesson = "kernels that were launched after it wait until all of it is copied"

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        spans = inputs.timeline.spans
        inbound = spans.direction == Direction.HOST_TO_DEVICE
        outbound = spans.direction == Direction.DEVICE_TO_HOST
        alone = inputs.is_copy & (inputs.sync_of_copy == NONE) & (inputs.launch != NONE) & (spans.size > STAGED_BYTES)
        copies = np.flatnonzero(alone & (inbound | outbound))
        builder.edit.lane[copies] = np.where(inbound[copies], SideLane.FETCH, SideLane.RETURN)
        builder.culprit[copies] = inputs.launch[copies]
