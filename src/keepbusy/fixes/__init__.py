"""Fixes: one class each, with all that is known of it. The order is that in which they are asked whether they apply."""

from __future__ import annotations

from keepbusy.causes.cause import Finding
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.places import Where
from keepbusy.fixes import among_ranks, copying, cpu_work, creating, launching, loading, memory, reading
from keepbusy.fixes.definition import Fix, PlacedCause, Remedy
from keepbusy.timeline.model import Ints

FIXES: tuple[Fix, ...] = (
    cpu_work.SaveLater(),
    among_ranks.SendTensors(),
    cpu_work.PadToFewLengths(),
    cpu_work.CollectBetweenEpochs(),
    copying.KeepParametersOnGpu(),
    copying.KeepActivations(),
    copying.CopyBeside(),
    creating.CreateOnGpu(),
    reading.ReplaceOperation(),
    launching.FuseOptimizer(),
    reading.DropChecks(),
    reading.PrintCopy(),
    reading.CallLessOften(),
    reading.TakeIndicesOnce(),
    reading.KeepShapes(),
    reading.TellSizes(),
    reading.Readback(),
    copying.KeepOnDevice(),
    copying.CopyWithoutWaiting(),
    reading.DropSync(),
    reading.DecideOnGpu(),
    reading.ReadAtOnce(),
    copying.PinMemory(),
    copying.PrefetchBatches(),
    cpu_work.ComputeOnGpu(),
    cpu_work.MoveOffTheLoop(),
    creating.MakeOnDevice(),
    loading.PrepareInWorkers(),
    memory.ExpandSegments(),
    memory.KeepMemory(),
    launching.LaunchLess(),
    launching.Compile(),
    launching.CaptureGraph(),
    among_ranks.ShareAmongRanks(),
    among_ranks.AlignRanks(),
    among_ranks.SendFromGpuToGpu(),
    among_ranks.Accumulate(),
    among_ranks.AverageOnce(),
    among_ranks.GatherAhead(),
    among_ranks.SizeBuckets(),
    among_ranks.TurnOffBroadcasts(),
    among_ranks.ComputeMeanwhile(),
    among_ranks.OverlapCollectives(),
    # those that no cause asks for
    loading.ShareAmongWorkers(),
    loading.PrepareOnce(),
    cpu_work.UseProcesses(),
    launching.OneTable(),
    launching.DoAtOnce(),
    among_ranks.SendTogether(),
    among_ranks.ShardBlocks(),
    among_ranks.OverlapStages(),
    among_ranks.CutIntoMicroBatches(),
)
BY_NAME = {fix.name: fix for fix in FIXES}


def remedy_for(inputs: CauseInputs, finding: Finding, where: Where, rows: Ints) -> Remedy:
    """What to do about a cause at one of its places."""
    return PlacedCause(inputs, finding, where, rows, FIXES).remedy()


def fix_named(name: str) -> Fix | None:
    """The fix of this name, which may hold a number: `num_workers=8`."""
    return BY_NAME.get("prepare_in_workers" if name.startswith("num_workers=") else name)


def is_written(name: str) -> bool:
    """Whether `keepbusy fix` can write it into a source."""
    fix = fix_named(name)
    return fix is not None and bool(fix.served_by)


def is_made_in_memory(name: str) -> bool:
    """Whether `run --fix` makes it without being asked for it."""
    fix = fix_named(name)
    return fix is not None and any(not BY_NAME[other].is_asked_for for other in fix.served_by)


ASKED_FOR = ("num_workers", *(fix.name for fix in FIXES if fix.is_asked_for))
"""Fixes that `run --fix` makes only where they are named."""
WRITTEN = ("num_workers", *dict.fromkeys(other for fix in FIXES for other in fix.served_by))
"""Fixes that are written into a source."""
