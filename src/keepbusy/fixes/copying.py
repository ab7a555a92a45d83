"""Fixes of copies between the memory of the host and that of the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.made_on_host import making_rows
from keepbusy.fixes.definition import Advice, Candidate, Fix, PlacedCause, Remedy, SourceEdit
from keepbusy.fixes.reading import copies_of
from keepbusy.timeline.edit import Edit
from keepbusy.timeline.figures import amount
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, Mask, next_kept


class KeepParametersOnGpu(Fix):
    """Shards that FSDP keeps on the host."""

    name, label = "keep_parameters_on_gpu", "keep parameters on the GPU"
    causes = ("blocking_copy", "copy_not_overlapped", "host_work")
    is_one_change = True
    advice = Advice(
        "Parameters and gradients are copied between CPU and GPU in each step, and the optimizer runs on the CPU. Keep "
        "them on the GPU if memory suffices.",
        "fully_shard(module)  # without offload_policy=CPUOffloadPolicy()",
        "torch.distributed.fsdp.fully_shard",
    )

    def applies(self, place: PlacedCause) -> bool:
        if place.cause == "host_work":
            return _steps_offloaded(place)
        return bool(place.inputs.within(Role.SHARDS)[place.rows].all())


def _steps_offloaded(place: PlacedCause) -> bool:
    """Whether it is an optimizer's work, of shards that FSDP copies between the host and the GPU."""
    inputs, spans = place.inputs, place.inputs.timeline.spans
    crosses = inputs.is_copy & np.isin(spans.direction, (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST))
    launches = inputs.launch[crosses & (spans.size > STAGED_BYTES) & (inputs.launch != NONE)]
    steps = spans.work[place.rows][inputs.within(Role.OPTIMIZER)[place.rows]].sum()
    return bool(2 * steps > spans.work[place.rows].sum() and inputs.within(Role.SHARDS)[launches].any())


class KeepActivations(Fix):
    """Activations that `torch.autograd.graph.save_on_cpu`, or hooks of the program's own, keep on the host."""

    name, label = "keep_activations", "keep activations on the GPU"
    causes = ("blocking_copy", "copy_not_overlapped")
    is_one_change = True
    in_pinned_memory = Advice(
        "Activations are copied to the CPU and back, and kernels wait for the copies. Keep them on the GPU if they "
        "fit, or recompute them in the backward pass.",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # instead of save_on_cpu; or neither",
        "torch.utils.checkpoint.checkpoint",
    )
    in_pageable_memory = Advice(
        "Activations are copied to the CPU and back through pageable memory, and Python waits. Keep them on the GPU if "
        "they fit, or recompute them in the backward pass. Otherwise, pin the memory.",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # or neither; at least "
        "save_on_cpu(pin_memory=True)",
        "torch.utils.checkpoint.checkpoint",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        spans, copies = place.inputs.timeline.spans, copies_of(place)
        kept = copies & kept_on_host(place.inputs)
        if 2 * spans.size[kept].sum() <= spans.size[copies].sum():
            return None
        return self.says(self.in_pinned_memory if spans.pinned[kept].all() else self.in_pageable_memory)

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:
        """What the backward pass needs does not leave the device."""
        inputs = place.inputs
        edit, copies = Edit.nothing(inputs.timeline), np.flatnonzero(kept_on_host(inputs))
        edit.drop[copies] = edit.drop[inputs.launch[copies]] = True
        syncs = np.isin(inputs.copy_of_sync, copies)
        edit.drop_wait[syncs] = True
        edit.work[syncs] = 0
        spans = inputs.timeline.spans
        leaves = spans.size[copies[spans.direction[copies] == Direction.DEVICE_TO_HOST]].sum()
        size = amount(float(leaves) / (inputs.steps * len(inputs.timeline.ranks)))
        reason = f"{size} per step leave the GPU and come back for the backward pass. It would need that much memory."
        return replace(usual, edit=edit, reason=reason)


def kept_on_host(inputs: CauseInputs) -> Mask:
    """Which copies take to the host what the backward pass needs, or bring it back: as much comes back as has left."""
    spans, launched = inputs.timeline.spans, np.append(inputs.within(Role.BACKWARD), False)[inputs.launch]
    large = inputs.is_copy & (inputs.launch != NONE) & (spans.size > STAGED_BYTES)
    back = large & launched & (spans.direction == Direction.HOST_TO_DEVICE)
    home = large & ~launched & (spans.direction == Direction.DEVICE_TO_HOST)
    return (home & np.isin(spans.size, spans.size[back])) | (back & np.isin(spans.size, spans.size[home]))


class CopyBeside(Fix):
    """Copies where there is no next batch to be fetched ahead."""

    name, label = "copy_beside", "copy on a separate stream"
    causes = ("copy_not_overlapped",)
    advice = Advice(
        "Copy it on a separate stream while something else is computed.",
        "with torch.cuda.stream(copying): ...  # and current_stream().wait_stream(copying) before it is used",
        "torch.cuda.stream",
    )

    def applies(self, place: PlacedCause) -> bool:
        spans, copies = place.inputs.timeline.spans, copies_of(place)
        all_leave = (spans.direction[copies] == Direction.DEVICE_TO_HOST).all()
        return bool(all_leave or place.inputs.timeline.facts.runs_once)


class KeepOnDevice(Fix):
    """Data that may stay on the GPU."""

    name, label = "keep_on_device", "keep the data on the GPU"
    causes = ("blocking_copy", "host_work")
    served_by = ("keep_on_device",)
    of_made_tensor = Advice(
        "The copy is tiny, but Python waits for it. Create the data on the GPU, or once before the loop.",
        'torch.randperm(n, device="cuda")  # or weights = torch.zeros(n, device="cuda") before the loop',
        "torch.randperm",
    )
    of_selected_rows = Advice(
        "Rows are selected on the CPU and then copied. If all of the data fits into GPU memory, keep it there and "
        "select there.",
        "data = data.cuda()  # once, before the loop; then data[chosen], with `chosen` made on the GPU, too",
        "torch.Tensor.cuda",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        if place.cause == "host_work":
            return self.says(self.of_selected_rows) if _selects_rows(place) else None
        launches = place.inputs.launch[copies_of(place)].tolist() if _is_tiny(place) else []
        made = sum(bool(len(making_rows(place.inputs, launch))) for launch in launches)
        return self.says(self.of_made_tensor) if 2 * made > len(launches) else None

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import ON_DEVICE

        return ON_DEVICE

    def suggested_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import ON_DEVICE_OR_RANDOM

        return ON_DEVICE_OR_RANDOM


def _is_tiny(place: PlacedCause) -> bool:
    """Whether CUDA takes all that is copied into its own memory, and the call could return at once."""
    spans, copies = place.inputs.timeline.spans, copies_of(place)
    return bool(spans.size[copies].max(initial=0) <= STAGED_BYTES)


def _selects_rows(place: PlacedCause) -> bool:
    """Whether rows are taken out of what stays on the host and go to the GPU next, or come from it and go there."""
    inputs, spans = place.inputs, place.inputs.timeline.spans
    command, large = np.append(inputs.command, NONE), inputs.is_copy & (spans.size > STAGED_BYTES)
    after = command[next_kept(spans.lane, inputs.command != NONE)[place.rows]]
    before = command[inputs.last_launch[place.rows]]
    goes = np.append(large & (spans.direction == Direction.HOST_TO_DEVICE), False)[after]
    comes = np.append(large & (spans.direction == Direction.DEVICE_TO_HOST), False)[before]
    work = spans.work[place.rows]
    return bool(2 * work[inputs.within(Role.PICKS)[place.rows] & (goes | comes)].sum() > work.sum())


class CopyWithoutWaiting(Fix):
    """Small tensors from pageable memory."""

    name, label = "copy_without_waiting", "copy without waiting"
    causes = ("blocking_copy",)
    served_by = ("copy_without_waiting", "prefetch")
    advice = Advice(
        "The copy is small, but Python waits for it. With non_blocking=True it does not: CUDA has read the tensor when "
        "the call returns. If the values are always the same, copy them once before the loop.",
        'x = x.to("cuda", non_blocking=True)  # x is small, and not in pinned memory',
        "torch.Tensor.to",
    )

    def applies(self, place: PlacedCause) -> bool:
        """Where the program itself calls `to`: no indexing, and no library that has a `to` of its own."""
        if place.where.library or place.where.operator not in ("", "aten::to", "aten::_to_copy"):
            return False
        spans, copies = place.inputs.timeline.spans, copies_of(place)
        arrives = spans.direction[copies] == Direction.HOST_TO_DEVICE
        return bool(len(arrives) and arrives.all() and not spans.pinned[copies].any()) and _is_tiny(place)

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:
        """The copies stay as they are."""
        return replace(usual, edit=usual.edit.only(~place.inputs.is_copy))

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import WITHOUT_WAITING

        return WITHOUT_WAITING


class PinMemory(Fix):
    """A script that runs once, and copies from pageable memory."""

    name, label = "pin_memory", "pin the memory"
    causes = ("blocking_copy",)
    served_by = ("pin_memory",)
    advice = Advice(
        "Create it in pinned memory, and copy it with non_blocking=True, so that Python does not wait.",
        'x = torch.empty(shape, pin_memory=True)  # then x.to("cuda", non_blocking=True)',
        "torch.Tensor.pin_memory",
    )

    def applies(self, place: PlacedCause) -> bool:
        return place.inputs.timeline.facts.runs_once

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.loaders import with_loader_arguments

        return SourceEdit("`pin_memory=True` in `DataLoader(...)`", with_loader_arguments(pin_memory="True"))


class PrefetchBatches(Fix):
    """Batches that can be fetched ahead."""

    name, label = "prefetch", "prefetch batches to the GPU"
    is_one_change = True
    served_by = ("prefetch", "make_on_device")
    usual = {  # noqa: RUF012
        "blocking_copy": Advice(
            "Prefetch batches through pinned memory, so that the copy overlaps with computing.",
            "for batch in keepbusy.prefetch(loader):  # DataLoader(..., pin_memory=True)",
            "keepbusy.prefetch",
        ),
        "copy_not_overlapped": Advice(
            "Prefetch batches on a separate stream, so that the copy overlaps with computing.",
            "for batch in keepbusy.prefetch(loader):  # already on the GPU",
            "keepbusy.prefetch",
        ),
    }

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.loaders import write_prefetch

        return SourceEdit("`keepbusy.prefetch(...)` around the loop's loader, and `pin_memory=True`", write_prefetch)
