"""The GPU finishes each kernel before Python has launched the next one."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.cause import CauseKind, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Kind


class LaunchBound(CauseKind):
    """Everything that a captured graph does not repeat: launches, and the host work between them."""

    place = LedgerPlace(
        name="launch_bound",
        label="launch-bound",
        colour="#cf8064",
        sentence="The GPU finishes kernels faster than Python launches them",
        happens="The GPU finishes each kernel before Python has launched the next one.",
        fixed_by=(
            "Fewer and larger launches: [a captured graph](../how-to/graph-a-step.md), `torch.compile`, fused "
            "optimizers, larger batches."
        ),
    )
    what = "{launches}{per}. The GPU finishes each before Python has launched the next."
    is_residual = True

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        spans = inputs.timeline.spans
        commands = np.flatnonzero(inputs.launch != NONE)
        launches, line = inputs.launch[commands], inputs.innermost_line
        # a launch with many commands is a graph's: these are captured already, and what its line launches besides
        # fills the graph's inputs and copies its results
        of_graphs = np.bincount(launches)[launches] > 1
        lines = np.unique(line[launches[of_graphs]])
        feeds_graph = np.isin(line, lines[lines != NONE])
        host = (spans.kind == Kind.LAUNCH) | (spans.kind == Kind.WORK)
        captured = host & ~inputs.is_heavy & ~inputs.by_workers & (inputs.loader_frame == NONE) & ~feeds_graph
        rows = np.flatnonzero(captured & ~inputs.within(Role.OBJECTS))  # no graph pickles
        builder.edit.work[rows] = 0
        builder.culprit[rows] = inputs.last_launch[rows]
        commands = commands[~of_graphs & ~feeds_graph[launches]]
        builder.edit.capture[commands] = True
        builder.culprit[commands] = inputs.launch[commands]
