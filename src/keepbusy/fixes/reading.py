"""Fixes of waits for values of the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keepbusy.causes.places import role_of_call
from keepbusy.fixes.definition import Advice, Candidate, Fix, PlacedCause, Remedy, SourceEdit, all_or_nothing
from keepbusy.timeline.frame_roles import Owner, Role
from keepbusy.timeline.model import NONE, Direction, Mask


def copies_of(place: PlacedCause) -> Mask:
    """The copies that this place waits for or launches."""
    return place.inputs.is_copy & np.isin(place.finding.culprit, place.rows)


def goes_to_host(place: PlacedCause) -> bool:
    """Whether most of these copies' time is that of copies from the GPU to the host."""
    spans, copies = place.inputs.timeline.spans, copies_of(place)
    back = copies & (spans.direction == Direction.DEVICE_TO_HOST)
    return bool(spans.work[back].sum() > spans.work[copies & ~back].sum())


def waits_in_backward(place: PlacedCause) -> bool:
    """Whether it is a backward pass that waits, and no hook of the program's in it."""
    inputs, frames = place.inputs, place.inputs.timeline.frames
    if place.cause != "host_sync" or not inputs.within(Role.BACKWARD)[place.rows].all():
        return False
    node, line = inputs.innermost(inputs.frames_with(Role.BACKWARD))[place.rows], inputs.innermost_line[place.rows]
    return bool(((line == NONE) | (frames.start[line] <= frames.start[node])).all())


def is_called_in_library(place: PlacedCause) -> Mask | None:
    """Which of the rows to blame a library's line calls, where these are the most; else None."""
    rows = place.inputs.shown_at[place.rows]
    in_library = np.isin(place.inputs.caller[rows], (Owner.LIBRARY, Owner.TORCH))
    return in_library if place.where.file and 2 * np.count_nonzero(in_library) > len(rows) else None


def called_operator(place: PlacedCause) -> int:
    """What the operator does that the program called: its roles."""
    return role_of_call(place.inputs.timeline, int(place.inputs.shown_at[place.rows][0]))


class ReplaceOperation(Fix):
    """Operations whose backward pass waits for the GPU."""

    name, label = "replace_operation", "use another operation"
    causes = ("host_sync",)
    advice = Advice(
        "PyTorch's backward pass of an operation waits for the GPU here, as that of cumprod does. Write it with other "
        "operations, such as torch.exp(torch.cumsum(torch.log(x), 0))."
    )

    def applies(self, place: PlacedCause) -> bool:
        return waits_in_backward(place)


class DropChecks(Fix):
    """Argument checks of torch.distributions."""

    name, label = "drop_checks", "turn off distribution checks"
    causes = ("host_sync",)
    is_one_change = removes_wait = is_gone_in_graph = True  # a graph is captured without argument checks
    advice = Advice(
        "torch.distributions validates arguments and samples, and Python waits for each answer. Turn these checks off "
        "once the program is correct.",
        "torch.distributions.Distribution.set_default_validate_args(False)  # once; or Normal(mean, scale, "
        "validate_args=False)",
        "torch.distributions.Distribution.set_default_validate_args",
    )

    def applies(self, place: PlacedCause) -> bool:
        return bool((place.inputs.library_role[place.rows] & Role.VALIDATES).any())


class PrintCopy(Fix):
    """Tensors of the GPU that are printed."""

    name, label = "print_copy", "print a copy on the CPU"
    causes = ("host_sync",)
    advice = Advice(
        "PyTorch reads a tensor of the GPU piece by piece to write it as text: copy it to the CPU once, and print the "
        "copy, in a loop an iteration later.",
        "copy = keepbusy.readback(tensor)  # print(copy.tensor) later; or, with one wait: print(tensor.cpu())",
        "keepbusy.readback",
    )

    def applies(self, place: PlacedCause) -> bool:
        in_library = is_called_in_library(place)
        if in_library is None:
            return False
        rows = place.inputs.shown_at[place.rows][in_library]
        return bool(place.inputs.within(Role.PRINTS)[rows].any())


class CallLessOften(Fix):
    """Reads within a library."""

    name, label = "call_less_often", "call it less often"
    causes = ("host_sync",)
    advice = Advice(
        "Python waits inside {library}, which this line calls: an option of the call may avoid that; else call it less "
        "often."
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        if is_called_in_library(place) is None:
            return None
        return self.says(self.advice._replace(advice=self.advice.advice.replace("{library}", place.where.library)))

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:
        return replace(usual, bounds=all_or_nothing(place.inputs, usual))


class TakeIndicesOnce(Fix):
    """Selections by a mask that is the same in all iterations."""

    name, label = "take_indices_once", "take the mask's indices once"
    causes = ("host_sync",)
    removes_wait = leaves_statement = True
    served_by = ("take_indices_once",)
    advice = Advice(
        "Only the GPU knows how many elements the mask selects, and it is the same mask in each iteration. Take its "
        "indices once, before the loop, and select with them.",
        "indices = mask.nonzero(as_tuple=True)  # before the loop; then x[indices] instead of x[mask]",
        "torch.nonzero",
    )

    def applies(self, place: PlacedCause) -> bool:
        """That it is the same is seen in the source alone."""
        if not called_operator(place) & Role.CHOOSES:
            return False
        from keepbusy.fixes.capture import sources_at

        sources = sources_at(place.inputs, [place.where.file])
        if not sources:
            return False
        from keepbusy.fixes.source.masks import constant_mask

        return any(constant_mask(source, place.where.line) is not None for source in sources.values())

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.masks import write_indices_once

        return SourceEdit(
            "`x[mask_indices]` instead of `x[mask]`, and `mask_indices = mask.nonzero(as_tuple=True)` before the loop",
            write_indices_once,
        )


class KeepShapes(Fix):
    """Selections by a mask, whose size only the GPU knows."""

    name, label = "keep_shapes", "torch.where instead of a mask"
    causes = ("host_sync",)
    removes_wait = is_not_for_loops = True
    served_by = ("keep_shapes",)
    is_asked_for = True
    advice = Advice(
        "Only the GPU knows the size of a masked selection. Compute all elements, and select with torch.where.",
        "y = torch.where(mask.unsqueeze(-1), changed, x)  # instead of y[mask] = ...",
        "torch.where",
    )

    def applies(self, place: PlacedCause) -> bool:
        return bool(called_operator(place) & Role.CHOOSES)

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.masks import write_masked_sums

        return SourceEdit(
            "`torch.where(mask, x, 0).sum()` instead of `x[mask].sum()`",
            write_masked_sums,
            1e-5,
            "sums are rounded in another order",
        )


class TellSizes(Fix):
    """Results whose size only the GPU knows."""

    name, label = "tell_sizes", "pass the output size"
    causes = ("host_sync",)
    removes_wait = is_not_for_loops = True
    of_output = Advice(
        "Only the GPU knows the size of the result. Pass it.",
        "torch.repeat_interleave(x, repeats, output_size=total)",
        "torch.repeat_interleave",
    )
    advice = Advice(
        "Only the GPU knows the size of the result. Pass it where the call accepts it, as in one_hot(labels, classes). "
        "Otherwise call this less often, or where the loop does not wait."
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        called = called_operator(place)
        if called & Role.REPEATS:
            return self.says(self.of_output)
        return self.says(self.advice) if called & Role.COUNTS else None


class DropSync(Fix):
    """Calls that wait for all work of the GPU."""

    name, label = "drop_sync", "remove the synchronization"
    causes = ("host_sync", "blocking_copy")
    removes_wait = True
    served_by = ("drop_sync",)
    advice = Advice(
        "Remove the synchronization. CUDA events time a phase without blocking Python.",
        "torch.cuda.Event(enable_timing=True)  # instead of torch.cuda.synchronize()",
        "torch.cuda.Event",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        if place.cause == "blocking_copy":  # from pinned memory nobody waits but who asks to
            pinned = place.inputs.timeline.spans.pinned[copies_of(place)].all()
            return self.says(self.advice) if pinned and place.inputs.timeline.facts.runs_once else None
        return self.says(self.advice) if called_operator(place) & Role.SYNCHRONIZES else None

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import without_call

        return SourceEdit("`torch.cuda.synchronize()` is removed", without_call("torch.cuda.synchronize"))


class DecideOnGpu(Fix):
    """Values by which Python branches."""

    name, label = "decide_on_gpu", "decide on the GPU"
    causes = ("host_sync",)
    advice = Advice(
        "Python branches on this value, so it cannot be read later. Decide on the GPU, or read many values in one "
        "call.",
        "x = torch.where(condition, changed, x)  # instead of `if`; or a mask, so that the whole batch continues "
        "together",
        "torch.where",
    )

    def applies(self, place: PlacedCause) -> bool:
        run = place.inputs.timeline.facts.run
        return run is not None and str(place.where) in run.decides

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:
        return replace(usual, bounds=all_or_nothing(place.inputs, usual))


class ReadAtOnce(Fix):
    """Values that a loop reads one by one."""

    name, label = "read_at_once", "read all values in one call"
    causes = ("host_sync",)
    removes_wait = True
    served_by = ("readback",)
    advice = Advice(
        "Values are read one by one, and each read waits for the GPU. Compute all of them, and read them in one call.",
        "values = torch.stack(values).tolist()  # one wait instead of one per value",
        "torch.stack",
    )

    def applies(self, place: PlacedCause) -> bool:
        return bool(np.isin(place.rows, [rows[0] for rows in place.inputs.reads_in_a_row]).all())


class Readback(Fix):
    """Values that nobody needs at once."""

    name, label = "readback", "read the value later"
    causes = ("blocking_copy",)
    removes_wait = True
    served_by = ("readback", "save_later", "keep_shapes")
    usual = {  # noqa: RUF012
        "host_sync": Advice(
            "Read the value asynchronously, one iteration later.",
            "value = keepbusy.readback(loss)  # float(value) one iteration later",
            "keepbusy.readback",
        )
    }
    of_copy = Advice(
        "Copy it asynchronously, and use it one iteration later. Or compute on the GPU.",
        "copy = keepbusy.readback(out)  # copy.tensor one iteration later",
        "keepbusy.readback",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        return self.says(self.of_copy) if goes_to_host(place) else None

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.late_reads import write_late_reads

        return SourceEdit(
            "`total += loss.detach().double()`, and `total = float(total)` after the loop", write_late_reads
        )
