"""The loader has not finished the next batch."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, Finding, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.places import by_place, place_of
from keepbusy.timeline.edit import SideLane
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Kind

TIMES_AS_MANY = 4
"""A trace does not show how many workers a loader has; the prediction is for so many times as many."""


class LateInput(CauseKind):
    """The loader prepares its batch in the training process, or its workers are too few."""

    place = LedgerPlace(
        name="input_late",
        label="late input",
        colour="#c07fd0",
        sentence="The GPU waits for the next batch",
        happens="The loader has not finished the next batch.",
        fixed_by="More loader workers, or less work per sample.",
    )

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        spans = inputs.timeline.spans
        batches = np.flatnonzero(inputs.by_workers)
        builder.edit.work[batches] = spans.work[batches] // TIMES_AS_MANY
        waits = np.flatnonzero(inputs.is_loader_wait)  # the loop's next wait is the one for a batch of the workers
        builder.culprit[batches] = (
            waits[np.minimum(np.searchsorted(waits, batches), len(waits) - 1)] if len(waits) else batches
        )
        frame = inputs.loader_frame
        rows = np.flatnonzero((frame != NONE) & (spans.kind == Kind.WORK))
        # a loader with workers only takes what they prepared
        takes = np.append(inputs.frames_with(Role.LOADER_WORKERS), False)[frame[rows]]
        rows = rows[~takes]
        _, first, which = np.unique(frame[rows], return_index=True, return_inverse=True)
        first_of_frame = rows[first][which] if len(rows) else rows
        is_first = rows == first_of_frame
        builder.edit.lane[rows[~is_first]] = SideLane.WORKERS
        builder.edit.work[rows] = spans.work[rows] // inputs.workers
        builder.culprit[rows] = first_of_frame

    def what_happened(self, inputs: CauseInputs, finding: Finding) -> str:
        if not inputs.by_workers.any():
            work, first_place = inputs.timeline.spans.work, place_of(inputs.timeline, int(finding.rows[0]))
            places = by_place(inputs, np.flatnonzero((inputs.loader_frame != NONE) & (work > 0)))
            place = max(places, key=lambda place: work[places[place]].sum())
            where = f", most of it at {place}," if place.file and str(place) != str(first_place) else ","
            return f"The training process prepares its own batches{where} and the GPU waits for them."
        waits = np.unique(inputs.timeline.rank_of_rows[finding.rows]).tolist()
        if len(waits) < len(inputs.timeline.ranks):
            return f"Rank {waits[0]} waits for its loader's workers, and the other ranks wait for rank {waits[0]}."
        return "The loop waits for the loader's workers, and the GPU waits for the loop."
