"""Causes: why a GPU waits. One file a cause; the order is that of reports."""

from __future__ import annotations

from keepbusy.causes.allocations import Allocations
from keepbusy.causes.cause import CauseKind, Finding, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.collectives import ExposedCollective
from keepbusy.causes.copies import BlockingCopy, CopyNotOverlapped
from keepbusy.causes.host_sync import HostSync
from keepbusy.causes.host_work import HostWork
from keepbusy.causes.late_input import LateInput
from keepbusy.causes.late_ranks import LatePeer
from keepbusy.causes.launches import LaunchBound
from keepbusy.causes.made_on_host import MadeOnHost
from keepbusy.timeline.edit import SideLane
from keepbusy.timeline.figures import amount, times
from keepbusy.timeline.model import Kind

_COMPUTING = LedgerPlace(
    name="computing",
    label="computing",
    colour="#4fa870",
    sentence="The GPU computes",
    happens="computes: a kernel runs that is not a collective.",
    letter="█",
)
_COPYING = LedgerPlace(
    name="copying",
    label="copying",
    colour="#45a0a8",
    sentence="The GPU only copies",
    happens="copies or fills memory and computes nothing meanwhile, and no cause explains it.",
    letter="▓",
)
_COLLECTIVE = LedgerPlace(
    name="collective",
    label="collective",
    colour="#5b8fd4",
    sentence="Communication does not overlap with computing",
    happens="exchanges data with other GPUs and computes nothing meanwhile. Only the transfer itself: a collective "
    "that waits for a late rank counts as `peer_late`.",
    letter="▒",
)
_PIPELINE_BUBBLE = LedgerPlace(
    name="pipeline_bubble",
    label="pipeline bubble",
    colour="#b7c7dd",
    sentence="Pipeline stages wait for each other",
    happens="A pipeline stage is idle until another stage's message arrives.",
    fixed_by="Let micro-batches follow each other, and use more of them: with twice as many the stages wait half as "
    "long. `--what-if` does not take this cause.",
    letter="o",
)
_UNKNOWN = LedgerPlace(
    name="unknown",
    label="unknown",
    colour="#8b9099",
    sentence="Not explained",
    happens="The recording does not show why.",
    letter="?",
)
KINDS: dict[str, CauseKind] = {
    kind.place.name: kind
    for kind in (
        HostSync(),
        BlockingCopy(),
        CopyNotOverlapped(),
        LateInput(),
        MadeOnHost(),
        LaunchBound(),
        Allocations(),
        HostWork(),
        LatePeer(),
        ExposedCollective(),
    )
}
"""Causes that are found together with the edit that fixes them."""
LEDGER: dict[str, LedgerPlace] = {
    place.name: place
    for place in (
        _COMPUTING,
        _COPYING,
        _COLLECTIVE,
        *(kind.place for kind in KINDS.values()),
        _PIPELINE_BUBBLE,
        _UNKNOWN,
    )
}
"""What each nanosecond of the plain step can be, in the order of reports."""


def findings(inputs: CauseInputs) -> dict[str, Finding]:
    """The findings of all causes that occur in the run."""
    kinds = {name: kind for name, kind in KINDS.items() if inputs.among_ranks or not kind.among_ranks}
    builders = {name: FindingBuilder(name, inputs.timeline) for name in kinds}
    for name, kind in kinds.items():
        kind.find(inputs, builders[name])
    # host work that another cause names counts there alone
    for other in ("made_on_host", "exposed_collective"):
        if other in builders:
            builders["host_work"].edit.drop[builders[other].edit.drop] = False
    all_findings = {cause: builder.finding() for cause, builder in builders.items()}
    return {cause: finding for cause, finding in all_findings.items() if len(finding.rows)}


def what_happened(inputs: CauseInputs, finding: Finding) -> str:
    """A sentence with counts. Reports add durations."""
    spans, of_a_rank = inputs.timeline.spans, inputs.steps * len(inputs.timeline.ranks)
    copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
    count = finding.count / of_a_rank
    per = "" if inputs.timeline.facts.runs_once else " per iteration"
    return (
        KINDS[finding.cause]
        .what_happened(inputs, finding)
        .format(
            per=per,
            often=times(count, per),
            launches="1 launch" if round(count) == 1 else f"{count:,.0f} launches",
            moved=amount(float(spans.size[copies].sum()) / of_a_rank),
        )
    )
