"""Python or CPU operators that keep the training thread from launching."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs


class HostWork(CauseKind):
    """Work in its own right, which no graph would remove."""

    place = LedgerPlace(
        name="host_work",
        label="host work",
        colour="#b58b70",
        sentence="The GPU waits for CPU work in the loop",
        happens="The CPU does something else: Python, logging, a checkpoint.",
        fixed_by="Move it to another thread or process, or do it less often.",
    )
    what = "The training thread does other work between its launches, and the GPU is idle meanwhile."
    is_residual = True

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        rows = np.flatnonzero(inputs.is_heavy)
        builder.edit.drop[rows] = True
        builder.culprit[rows] = rows
