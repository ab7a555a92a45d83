"""Fixes of what ranks do for each other, and of what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.collectives import without_messages
from keepbusy.causes.places import by_place
from keepbusy.fixes.definition import Advice, Candidate, Fix, PlacedCause, Remedy, SourceEdit
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, FrameKind, Ints

# what one rank does more than others


class ShareAmongRanks(Fix):
    """Work that only one rank does."""

    name, label = "share_among_ranks", "share the work among ranks"
    causes = ("peer_late",)
    advice = Advice(
        "Only this rank does it, and the others wait. Do it less often, or give each rank a share of it.",
        "if step % 100 == 0: ...  # or a share on every rank, and dist.all_reduce(result)",
        "torch.distributed.all_reduce",
    )

    def applies(self, place: PlacedCause) -> bool:
        return bool((place.inputs.frame_of_one_rank[place.rows] != NONE).all())


class AlignRanks(Fix):
    """Work that is dealt out unevenly."""

    name, label = "align_ranks", "give every rank the same work"
    is_one_change = True  # a share of the work given to one rank is another's
    usual = {  # noqa: RUF012
        "peer_late": Advice(
            "Give every rank the same amount of work: at each collective the others wait for the late rank.",
            "DistributedSampler(dataset, shuffle=True)  # batches of equal cost on every rank",
            "torch.utils.data.DistributedSampler",
        )
    }


# what ranks send


class SendTensors(Fix):
    """Python objects that are sent."""

    name, label = "send_tensors", "send tensors, not objects"
    causes = ("host_sync", "host_work")
    advice = Advice(
        "Python objects are sent pickled, in two collectives that block Python. Send a tensor instead, and read it "
        "occasionally.",
        "dist.all_reduce(sums)  # a tensor; or let every rank draw the same by a common seed",
        "torch.distributed.all_reduce",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        inputs, rows = place.inputs, place.rows
        if place.cause == "host_sync":
            return self.says(self.advice) if place.finding.edit.drop[rows].any() else None
        work = inputs.timeline.spans.work[rows]
        return self.says(self.advice) if 2 * work[inputs.within(Role.OBJECTS)[rows]].sum() > work.sum() else None


class SendFromGpuToGpu(Fix):
    """Messages that are copied through the memory of hosts."""

    name, label = "send_from_gpu_to_gpu", "send from GPU to GPU"
    causes = ("exposed_collective",)
    advice = Advice(
        "Python waits for another rank's message, which is copied through CPU memory. NCCL sends it from GPU to GPU "
        "without blocking Python.",
        "dist.batch_isend_irecv([...])  # of tensors on the GPU, in a group of backend nccl",
        "torch.distributed.batch_isend_irecv",
    )

    def applies(self, place: PlacedCause) -> bool:
        return bool(place.inputs.within(Role.THROUGH_HOST)[_launches(place)].all())


def _launches(place: PlacedCause) -> Ints:
    """Of these collectives, their launches; of one that nobody launched here, itself."""
    launch = place.inputs.launch[place.rows]
    return np.where(launch == NONE, place.rows, launch)


def _of_gradients(place: PlacedCause) -> bool:
    return bool(place.inputs.hands_over_gradients[_launches(place)].any())


def _sent_early(place: PlacedCause) -> bool:
    """Whether the finding's edit leaves these collectives out: more is added before anybody uses the sum."""
    return bool(place.finding.edit.drop[_launches(place)].any())


class Accumulate(Fix):
    """Gradients that DDP sends after every micro-batch."""

    name, label = "accumulate", "send gradients once per step"
    causes = ("exposed_collective",)
    is_one_change = True
    served_by = ("accumulate",)
    is_asked_for = True
    advice = Advice(
        "Accumulate the gradients of all micro-batches, and send them with the last one.",
        "for micro in keepbusy.accumulate(model, loader, count=4): ...  # if micro.last: optimizer.step()",
        "keepbusy.accumulate",
    )

    def applies(self, place: PlacedCause) -> bool:
        return _sent_early(place) and _of_gradients(place)

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.last_micro_batch import write_last_travels

        return SourceEdit(
            "DDP's own switch, `model.require_backward_grad_sync`, in a loop over micro-batches",
            write_last_travels,
            1e-4,
            "gradients of ranks and micro-batches are added in another order",
        )


class AverageOnce(Fix):
    """Gradients that the program itself averages after every micro-batch."""

    name, label = "average_once", "average gradients once per step"
    causes = ("exposed_collective",)
    is_one_change = True
    advice = Advice(
        "Add up the gradients of all micro-batches, and average them over the ranks once, after the last one.",
        "if last_micro_batch: average(gradients)  # instead of once for each",
        "torch.distributed.all_reduce",
    )

    def applies(self, place: PlacedCause) -> bool:
        return _sent_early(place)


class GatherAhead(Fix):
    """Parameters that FSDP gathers when they are needed."""

    name, label = "gather_ahead", "prefetch FSDP's all-gathers"
    causes = ("exposed_collective",)
    advice = Advice(
        "Gather the next layers' parameters while these compute, or keep them gathered until the backward pass.",
        "block.set_modules_to_forward_prefetch([next_block])  # or fully_shard(block, reshard_after_forward=False)",
        "torch.distributed.fsdp.fully_shard",
    )

    def applies(self, place: PlacedCause) -> bool:
        return bool(place.inputs.within(Role.SHARDS)[_launches(place)].any())


class SizeBuckets(Fix):
    """Gradients that DDP sends in buckets."""

    name, label = "size_buckets", "try other DDP bucket sizes"
    causes = ("exposed_collective",)
    advice = Advice(
        "DDP sends gradients while others are computed. These are the last ones, or the link is full. Try other bucket "
        "sizes, or send fewer bytes.",
        "DistributedDataParallel(model, bucket_cap_mb=50)  # or model.register_comm_hook(None, bf16_compress_hook)",
        "torch.nn.parallel.DistributedDataParallel",
    )

    def applies(self, place: PlacedCause) -> bool:
        return _of_gradients(place)


class TurnOffBroadcasts(Fix):
    """Buffers that DDP sends before each forward pass."""

    name, label = "turn_off_broadcasts", "turn off DDP buffer broadcasts"
    causes = ("exposed_collective",)
    advice = Advice(
        "DDP sends rank 0's buffers to all ranks before each forward pass. Turn that off if ranks may keep their own "
        "buffers.",
        "DistributedDataParallel(model, broadcast_buffers=False)",
        "torch.nn.parallel.DistributedDataParallel",
    )

    def applies(self, place: PlacedCause) -> bool:
        """DDP broadcasts them from within its own call."""
        frames, frame = place.inputs.timeline.frames, int(place.inputs.timeline.spans.frame[_launches(place)[0]])
        if frame == NONE or not frames.role[frame] & Role.BROADCASTS:
            return False
        around = takewhile(lambda outer: frames.kind[outer] != FrameKind.PYTHON, frames.around(frame))
        return any(frames.role[outer] & Role.DDP_FORWARD for outer in around)


class ComputeMeanwhile(Fix):
    """Collectives whose result is needed at once."""

    name, label = "compute_meanwhile", "compute during the transfer"
    causes = ("exposed_collective",)
    advice = Advice(
        "The result is needed immediately. Give the GPU other work during the transfer, such as the other half of the "
        "batch.",
        "work = dist.all_reduce(part, async_op=True)  # the other half; then work.wait()",
        "torch.distributed.all_reduce",
    )

    def applies(self, place: PlacedCause) -> bool:
        return _before_gradients(place.inputs, int(_launches(place)[0]))


def _before_gradients(inputs: CauseInputs, row: int) -> bool:
    """Whether a backward pass is still to come in its step, or to be finished; so it is also where there is none."""
    timeline = inputs.timeline
    of_rank = timeline.rank_of_rows == timeline.rank_of_rows[row]
    backward = of_rank & inputs.within(Role.BACKWARD)
    marks = np.append(timeline.marks[of_rank[timeline.marks]], len(timeline))
    return bool(backward[row : marks[np.searchsorted(marks, row, side="right")]].any()) or not backward.any()


class OverlapCollectives(Fix):
    """Gradients that the program itself sends after the backward pass."""

    name, label = "overlap_collectives", "overlap gradients with backward"
    usual = {  # noqa: RUF012
        "exposed_collective": Advice(
            "Send the gradients during the backward pass.",
            "DistributedDataParallel(model, gradient_as_bucket_view=True)  # instead of an all_reduce afterwards",
            "torch.nn.parallel.DistributedDataParallel",
        )
    }


# fixes that no cause asks for: see `repeated_calls` and `pipeline_stages`


class SendTogether(Fix):
    """Small tensors that are sent one by one."""

    name, label = "send_together", "send small tensors as one"
    advice = Advice(
        "Small tensors are sent one by one, and each call has its cost. Concatenate them and send one tensor. "
        "ZeroRedundancyOptimizer does so with parameters_as_bucket_view=True.",
        "flat = torch.nn.utils.parameters_to_vector(tensors); dist.all_reduce(flat)  # and vector_to_parameters(flat, "
        "tensors)",
        "torch.nn.utils.parameters_to_vector",
    )


class ShardBlocks(Fix):
    """FSDP over each layer of a block."""

    name, label = "shard_blocks", "shard blocks, not layers"
    advice = Advice(
        "Call fully_shard on each block, not on each layer in it: fewer collectives, and less CPU work around them.",
        "for block in model.blocks: fully_shard(block)",
        "torch.distributed.fsdp.fully_shard",
    )


class OverlapStages(Fix):
    """Pipelines in which a micro-batch passes all stages before the next begins."""

    name, label = "overlap_stages", "overlap the pipeline stages"
    advice = Advice(
        "Each micro-batch passes all stages before the next begins. Send the next ones right behind it, all forward "
        "and then all backward, so that stages work at the same time.",
        "ScheduleGPipe(stage, n_microbatches=count)  # or 1F1B; by hand: dist.irecv of the next one before this one",
        "torch.distributed.pipelining.ScheduleGPipe",
    )


class CutIntoMicroBatches(Fix):
    """Pipelines with too few micro-batches."""

    name, label = "cut_into_micro_batches", "use more micro-batches"
    is_uncertain = True  # small pieces may not fill the GPU
    advice = Advice(
        "Split the batch into more, smaller micro-batches. A stage then waits only for the first and the last of them.",
        "Schedule1F1B(stage, n_microbatches={pieces})  # torch.distributed.pipelining",
        "torch.distributed.pipelining.Schedule1F1B",
    )


def pipeline_stages(inputs: CauseInputs) -> Iterator[Candidate]:
    """Stages that wait for each other's micro-batches: replayed is what they would take if they never did."""
    pipeline = Pipeline.of(inputs)
    if pipeline is None:
        return
    remedy, reason = OverlapStages().says(), ""
    if pipeline.pieces_after != pipeline.pieces:
        advice = CutIntoMicroBatches.advice
        code = advice.code.format(pieces=pipeline.pieces_after)
        remedy = CutIntoMicroBatches().says(advice._replace(code=code))
        reason = "Smaller micro-batches use the GPU less efficiently. Try how many are best."
    messages = inputs.launch[inputs.is_message]
    receives = messages[inputs.within(Role.RECEIVES)[messages]]
    places = by_place(inputs, receives if len(receives) else messages)
    edit, share = without_messages(inputs), 1.0 - pipeline.stays
    yield Candidate(remedy, tuple(places), ("pipeline_bubble",), edit, share=share, reason=reason)


class Pipeline(NamedTuple):
    """The micro-batches of a step, as the first stage sends them: how many there are, how many at once under way."""

    pieces: int
    together: int

    @staticmethod
    def of(inputs: CauseInputs) -> Pipeline | None:
        """None where ranks exchange messages, and none of them begins its steps with waiting for one.

        Which way those of PyTorch's own schedules go is not known: half of them forward, all of these first.
        """
        timeline = inputs.timeline
        rows = inputs.launch[inputs.is_message]
        role = np.append(timeline.frames.role, 0)[timeline.spans.frame[rows]]
        sent, rank_of_message = np.where(role & Role.RECEIVES, -1, 1), timeline.rank_of_rows[rows]
        of_rank = [sent[rank_of_message == rank] for rank in timeline.ranks]
        if inputs.frames_with(Role.PIECE).any():
            pieces = max(1, min(map(len, of_rank)) // inputs.steps // 2)
            return Pipeline(pieces, pieces)
        first = next((messages for messages in of_rank if len(messages) and messages[0] > 0), None)
        if first is None or not any(len(messages) and messages[0] < 0 for messages in of_rank):
            return None
        return Pipeline(max(1, round((first > 0).sum() / inputs.steps)), int(np.cumsum(first).max()))

    @property
    def pieces_after(self) -> int:
        """By the remedy: as many as there are, where they only have to follow each other; else twice as many."""
        return self.pieces if self.together == 1 < self.pieces else 2 * max(self.pieces, 2)

    @property
    def stays(self) -> float:
        """The share of the wait that is left: what the stages wait while the pipeline fills and drains."""
        return self.together / self.pieces_after
