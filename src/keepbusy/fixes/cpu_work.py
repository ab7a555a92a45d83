"""Fixes of CPU work for which the GPU waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.fixes.definition import Advice, Candidate, Fix, PlacedCause, Remedy, SourceEdit, all_or_nothing
from keepbusy.fixes.reading import goes_to_host
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Ints


def writes_checkpoint(inputs: CauseInputs, rows: Ints) -> bool:
    return bool(2 * np.count_nonzero(inputs.within(Role.WRITES)[rows]) > len(rows))


class SaveLater(Fix):
    """Checkpoints for which the training waits."""

    name, label = "save_later", "save in the background"
    causes = ("host_sync", "blocking_copy", "host_work", "peer_late")
    served_by = ("save_later",)
    is_asked_for = True
    advice = Advice(
        "Write the checkpoint in a thread while training continues.",
        "keepbusy.save_later(state, path)  # instead of torch.save",
        "keepbusy.save_later",
    )

    def applies(self, place: PlacedCause) -> bool:
        applies = writes_checkpoint(place.inputs, place.rows)
        return applies and (place.cause != "blocking_copy" or goes_to_host(place))

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import write_save_later

        return SourceEdit(
            "`keepbusy.save_later(...)` instead of `torch.save(...)`",
            write_save_later,
            why="the file is there a little later",
        )


class PadToFewLengths(Fix):
    """Shapes that change from step to step."""

    name, label = "pad_to_few_lengths", "pad to a few lengths"
    causes = ("host_work",)
    advice = Advice(
        "PyTorch prepares each new shape before it launches a kernel, as cuDNN does. Pad to a few lengths, so that "
        "shapes repeat.",
        "x = F.pad(x, (0, -len_of(x) % 64))  # along the dimension that varies, with a mask for the padding",
        "torch.nn.functional.pad",
    )

    def applies(self, place: PlacedCause) -> bool:
        """Where it is PyTorch that works, before it launches a kernel: cuDNN looks for one whenever a shape is new."""
        inputs, spans = place.inputs, place.inputs.timeline.spans
        layers = np.append(inputs.frames_with(Role.LAYER) & ~inputs.launch_free, False)
        work = spans.work[place.rows]
        return bool(2 * work[layers[spans.frame[place.rows]]].sum() > work.sum())


class CollectBetweenEpochs(Fix):
    """Python's garbage collector."""

    name, label = "collect_between_epochs", "collect garbage between epochs"
    causes = ("host_work",)
    advice = Advice(
        "Python's garbage collector visits all objects. Freeze those that stay alive once they exist, and collect "
        "between epochs.",
        "gc.collect(); gc.freeze()  # once all is set up; or gc.disable(), and gc.collect() after each epoch",
        "gc.freeze",
    )

    def applies(self, place: PlacedCause) -> bool:
        return _takes_as_long_as_the_collector(place)


def _takes_as_long_as_the_collector(place: PlacedCause) -> bool:
    timeline = place.inputs.timeline
    collector = max((run.collector for run in timeline.facts.plain_runs.values()), default=0)
    takes = timeline.spans.work[place.rows].sum() / place.inputs.steps / len(timeline.ranks)
    return bool(takes < 2 * collector < 4 * takes)


class ComputeOnGpu(Fix):
    """CPU work that needs a value of the GPU, and that the GPU needs."""

    name, label = "compute_on_gpu", "compute it on the GPU"
    causes = ("host_work",)
    needs_the_value = Advice(
        "This CPU work needs a value of the GPU, and the GPU waits for its result. Compute it on the GPU, or use "
        "larger batches."
    )
    of_idle_line = Advice(
        "The GPU is idle while Python is at this line. Compute this on the GPU, in larger batches, or where nothing "
        "waits for it."
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        return self.says(self.needs_the_value) if (place.inputs.needs_read[place.rows] != NONE).all() else None

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:
        reason = "It needs the value that is read there, and the GPU needs its result, so the two cannot overlap."
        return replace(usual, bounds=all_or_nothing(place.inputs, usual), reason=reason)


class MoveOffTheLoop(Fix):
    """CPU work that nothing is known of but its line."""

    name, label = "move_off_the_loop", "move CPU work out of the loop"
    usual = {  # noqa: RUF012
        "host_work": Advice(
            "Do it less often, or in a thread beside the loop. If it prepares input, move it to the loader's workers."
        )
    }


class UseProcesses(Fix):
    """Threads of the program that hold Python's lock."""

    name, label = "use_processes", "use processes, not threads"
    advice = Advice(
        "Use processes, such as a loader's workers, or calls that release Python's lock, such as NumPy's on whole "
        "arrays.",
        "DataLoader(dataset, num_workers=4)  # or concurrent.futures.ProcessPoolExecutor, instead of a thread",
    )
