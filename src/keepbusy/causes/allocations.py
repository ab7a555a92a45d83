"""Memory that the caching allocator requests from the driver, or gives back to it, again and again."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.timeline.model import Kind


class Allocations(CauseKind):
    """cudaMalloc and cudaFree in the steady state: memory that the caching allocator should have kept."""

    place = LedgerPlace(
        name="allocator",
        label="allocator",
        colour="#b0a06a",
        sentence="PyTorch requests memory from the driver again and again",
        happens=(
            "PyTorch requests memory from the driver and returns it: `empty_cache`, fragmentation. The driver waits "
            "for the GPU when memory is returned."
        ),
        fixed_by="Leave the allocator alone.",
    )
    what = "PyTorch requests memory from the driver, or frees it, {often}. Some of these calls stop the GPU."
    lesson = "memory is requested from the driver once and then kept"

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        rank_of_rows = inputs.timeline.rank_of_rows
        rows = np.flatnonzero(inputs.timeline.spans.kind == Kind.ALLOCATE)
        builder.edit.drop[rows] = True
        builder.culprit[rows], builder.count = rows, len(rows)
        for rank in inputs.timeline.ranks:  # a program that frees memory itself has to request it again
            of_rank = rows[rank_of_rows[rows] == rank]
            freed = of_rank[inputs.is_given_back[of_rank]]
            if len(freed):
                builder.culprit[of_rank] = freed[np.maximum(np.searchsorted(freed, of_rank, side="right") - 1, 0)]
