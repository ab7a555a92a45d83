"""For each cause what happened, in a sentence, and what to do about it: a fix's name, a sentence and a line of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keepbusy.explain.causes.host import loader_frame
from keepbusy.explain.causes.syncs import of_large_copy
from keepbusy.explain.diagnosis import Where
from keepbusy.explain.edit import Finding, SideLane
from keepbusy.explain.places import late_ranks
from keepbusy.explain.scene import STAGED_BYTES, Scene
from keepbusy.timeline.frame_roles import DDP_FORWARD, Role
from keepbusy.timeline.model import NONE, Direction, FrameKind, Ints, Kind


class Remedy(NamedTuple):
    """What to do about a cause."""

    fix: str
    advice: str
    code: str
    api: str

    @property
    def name(self) -> str:
        """As users know it: by our own verb where there is one."""
        return self.api.removeprefix("keepbusy.") if self.api.startswith("keepbusy.") else self.fix


_OF_LIGHTNING = {"host_sync": "Trainer(log_every_n_steps=50), and self.log(..., prog_bar=False)"}
TRAINER_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "transformers/trainer.py": {
        "input_late": "TrainingArguments(dataloader_num_workers=4, dataloader_persistent_workers=True)",
        "host_sync": "TrainingArguments(logging_nan_inf_filter=False, logging_steps=100)",
        "launch_bound": "TrainingArguments(torch_compile=True)",
    },
    "lightning/pytorch/": _OF_LIGHTNING,
    "pytorch_lightning/": _OF_LIGHTNING,
}
"""By the trainer that holds the loop and by cause: who calls one has no line of that loop to change."""


def setting_of(causes: Sequence[str], holders: Sequence[str]) -> str:
    """What the fix of these causes is called by the trainer among those that hold a loop; nothing where it has none."""
    known = [settings for trainer, settings in TRAINER_SETTINGS.items() for one in holders if one.startswith(trainer)]
    return next((settings[cause] for settings in known for cause in causes if cause in settings), "")


REMEDIES = {
    "host_sync": Remedy(
        "read_later",
        "Let the value travel while Python goes on, and read it a step later.",
        "value = keepbusy.readback(loss)  # float(value) once the next step is launched",
        "keepbusy.readback",
    ),
    "blocking_copy": Remedy(
        "prefetch_input",
        "Fetch batches ahead, through pinned memory, so that the copy runs beside the computation.",
        "for batch in keepbusy.prefetch(loader):  # DataLoader(..., pin_memory=True)",
        "keepbusy.prefetch",
    ),
    "copy_not_overlapped": Remedy(
        "prefetch_input",
        "Fetch batches ahead, on a stream of their own, so that the copy runs beside the computation.",
        "for batch in keepbusy.prefetch(loader):  # on the device already",
        "keepbusy.prefetch",
    ),
    "input_late": Remedy(
        "prepare_in_workers",
        "Let worker processes prepare the batches ahead.",
        "DataLoader(..., num_workers={workers}, pin_memory=True, persistent_workers=True)",
        "torch.utils.data.DataLoader",
    ),
    "made_on_host": Remedy(
        "make_on_device",
        "Make the tensor on the GPU, where it is needed.",
        'torch.randn(shape, device="cuda")  # no copy, no work for the CPU',
        "torch.randn",
    ),
    "launch_bound": Remedy(
        "capture_graph",
        "Capture the step once and replay it: one launch in place of many.",
        "step = keepbusy.graph(train_step)  # or torch.compile(step, mode='reduce-overhead')",
        "keepbusy.graph",
    ),
    "allocator": Remedy(
        "keep_memory",
        "Leave the caching allocator its memory: no empty_cache() in the loop, shapes that repeat.",
        "# drop torch.cuda.empty_cache(); PYTORCH_ALLOC_CONF=expandable_segments:True",
        "torch.cuda.empty_cache",
    ),
    "host_work": Remedy(
        "move_off_the_loop",
        "Do it less often, or in a thread beside the loop; if it prepares input, leave it to the loader's workers.",
        "",  # no line of ours fits whatever work this is
        "",
    ),
    "peer_late": Remedy(
        "align_ranks",
        "Give every rank the same work: the others wait for the late one at each collective.",
        "DistributedSampler(dataset, shuffle=True)  # batches of equal cost on every rank",
        "torch.utils.data.DistributedSampler",
    ),
    "exposed_collective": Remedy(
        "overlap_collectives",
        "Let the gradients travel during the backward pass.",
        "DistributedDataParallel(model, gradient_as_bucket_view=True)  # in place of an all_reduce afterwards",
        "torch.nn.parallel.DistributedDataParallel",
    ),
}

SYNCS = (
    (
        re.compile(r"(?<!is_)nonzero|index|Index|masked_select|argwhere"),
        Remedy(
            "keep_shapes",
            "The size of a masked selection is known only to the GPU: compute on everything, and choose with where.",
            "y = torch.where(mask.unsqueeze(-1), changed, x)  # in place of y[mask] = ...",
            "torch.where",
        ),
    ),
    (
        re.compile(r"repeat_interleave"),
        Remedy(
            "tell_sizes",
            "The size of the result is known only to the GPU: give it.",
            "torch.repeat_interleave(x, repeats, output_size=total)",
            "torch.repeat_interleave",
        ),
    ),
    (
        re.compile(r"unique|bincount"),
        Remedy(
            "tell_sizes",
            "The size of the result is known only to the GPU: do this less often, or where the loop does not wait.",
            "",
            "",
        ),
    ),
    (
        re.compile(r"Synchronize"),
        Remedy(
            "drop_sync",
            "Drop the synchronisation; events time a phase without stopping Python.",
            "torch.cuda.Event(enable_timing=True)  # in place of torch.cuda.synchronize()",
            "torch.cuda.Event",
        ),
    ),
)
MORE_WORKERS = Remedy(
    "prepare_in_workers",
    "Give the loader four times the workers, as far as there are cores, and let them fetch further ahead.",
    "DataLoader(..., num_workers=min(4 * today, os.cpu_count()), prefetch_factor=4, persistent_workers=True)",
    "torch.utils.data.DataLoader",
)
SHARED_AMONG_WORKERS = Remedy(
    "share_among_workers",
    "Give every worker a share: in the data set's __iter__, each takes every n-th sample of all files.",
    "itertools.islice(samples, info.id, None, info.num_workers)  # info = torch.utils.data.get_worker_info()",
    "torch.utils.data.get_worker_info",
)
COMPILED_AMONG_RANKS = Remedy(
    "capture_graph",
    "Compile the model: fewer launches, and those between collectives replayed as graphs.",
    'torch.compile(model, mode="reduce-overhead")  # and fused=True for the optimizer',
    "torch.compile",
)
COMPILED = Remedy(
    "compile",
    "Compile the model: fewer launches. The step as a whole cannot be captured as it is, for {why}.",
    "model = torch.compile(model)  # and fused=True for the optimizer",
    "torch.compile",
)
SEND_ONCE = Remedy(
    "send_once",
    "Accumulate the gradients of all micro-batches, and let them travel with the last one.",
    "for micro in keepbusy.accumulate(model, loader, count=4): ...  # if micro.last: optimizer.step()",
    "keepbusy.accumulate",
)
AVERAGE_ONCE = Remedy(
    "average_once",
    "Add up the gradients of all micro-batches, and average them over the ranks once, after the last one.",
    "if last_micro_batch: average(gradients)  # in place of once for each",
    "torch.distributed.all_reduce",
)
SEND_TENSORS = Remedy(
    "send_tensors",
    "Python objects travel pickled, as two collectives that Python waits for: send a tensor, and read it now and then.",
    "dist.all_reduce(sums)  # a tensor; or let every rank draw the same by a common seed",
    "torch.distributed.all_reduce",
)
LATE_LOADER = Remedy(
    "prepare_in_workers",
    "Only this rank waits for its loader, and the others wait for it: more workers there, or the same data for all.",
    "DataLoader(..., num_workers=min(4 * today, os.cpu_count()), persistent_workers=True)",
    "torch.utils.data.DataLoader",
)
ONE_FOR_ALL = Remedy(
    "share_among_ranks",
    "This rank alone does it, and the others wait: do it less often, or give each rank a share of it.",
    "if step % 100 == 0: ...  # or a share on every rank, and dist.all_reduce(result)",
    "torch.distributed.all_reduce",
)
CHECKPOINT = Remedy(
    "save_later",
    "Let a thread write the checkpoint while the training goes on.",
    "keepbusy.save_later(state, path)  # in place of torch.save",
    "keepbusy.save_later",
)
COPY_BACK_LATER = Remedy(
    "copy_back_later",
    "Let it travel beside the computation, and use it a step later; or compute on the GPU.",
    "copy = keepbusy.readback(out)  # copy.tensor once the next step is launched",
    "keepbusy.readback",
)
KEEP_ON_DEVICE = Remedy(
    "keep_on_device",
    "So little data costs a wait, not a copy: make it on the GPU, or once before the loop.",
    'torch.randperm(n, device="cuda")  # or weights = torch.tensor([...], device="cuda") before the loop',
    "torch.randperm",
)
SCALER = Remedy(
    "fuse_optimizer",
    "GradScaler reads whether gradients overflowed; a fused optimizer checks that on the GPU.",
    "torch.optim.AdamW(model.parameters(), fused=True)  # or bfloat16, which needs no scaler",
    "torch.optim.AdamW",
)
PINNED = Remedy(
    "pin_memory",
    "Make it in pinned memory, and copy it with non_blocking=True: then Python goes on while it travels.",
    'x = torch.empty(shape, pin_memory=True)  # then x.to("cuda", non_blocking=True)',
    "torch.Tensor.pin_memory",
)
BESIDE = Remedy(
    "copy_beside",
    "Copy it on a stream of its own, while something else is computed.",
    "with torch.cuda.stream(copying): ...  # and current_stream().wait_stream(copying) before it is used",
    "torch.cuda.stream",
)
"""Of a script without a loop: there is no next batch to be fetched ahead."""


LAUNCHED_ONCE = Remedy(
    "launch_less",
    "Of a script that runs once nothing pays for compiling it or for capturing a graph: in a loop it would.",
    "",
    "",
)
SHARDED = Remedy(
    "gather_ahead",
    "Gather the next layers' parameters while these compute, or keep them gathered until the backward pass.",
    "block.set_modules_to_forward_prefetch([next_block])  # or fully_shard(block, reshard_after_forward=False)",
    "torch.distributed.fsdp.fully_shard",
)
IN_BUCKETS = Remedy(
    "size_buckets",
    "DDP sends gradients while others are computed: these come last, or the link is full. Try other buckets, or send "
    "fewer bytes.",
    "DistributedDataParallel(model, bucket_cap_mb=50)  # or model.register_comm_hook(None, bf16_compress_hook)",
    "torch.nn.parallel.DistributedDataParallel",
)
OWN_BUFFERS = Remedy(
    "turn_off_broadcasts",
    "DDP sends rank 0's buffers to all before each forward pass. Where ranks may keep their own, or theirs stay alike, "
    "it need not.",
    "DistributedDataParallel(model, broadcast_buffers=False)",
    "torch.nn.parallel.DistributedDataParallel",
)
NEEDED_AT_ONCE = Remedy(
    "compute_meanwhile",
    "What travels here is needed at once: give the GPU something else meanwhile, such as another half of the batch.",
    "work = dist.all_reduce(part, async_op=True)  # the other half; then work.wait()",
    "torch.distributed.all_reduce",
)
PIECES_TOGETHER = Remedy(
    "overlap_stages",
    "Each micro-batch goes there and back before the next begins: let the next ones follow it at once, all forward and "
    "then all backward, so that stages work at the same time.",
    "ScheduleGPipe(stage, n_microbatches=count)  # or 1F1B; by hand: dist.irecv of the next one before this one",
    "torch.distributed.pipelining.ScheduleGPipe",
)
MORE_PIECES = Remedy(
    "cut_into_micro_batches",
    "Cut the batch into more, smaller micro-batches: a stage waits only while the first of them comes and the last one "
    "leaves.",
    "Schedule1F1B(stage, n_microbatches={pieces})  # torch.distributed.pipelining",
    "torch.distributed.pipelining.Schedule1F1B",
)
ON_THE_GPU = Remedy(
    "compute_on_gpu",
    "The GPU has nothing to do while the host is here: compute this on the GPU, or where nothing waits for it.",
    "",
    "",
)
FUSED = Remedy(
    "fuse_optimizer",
    "The optimizer updates one parameter after the other: fused, or with foreach=True, a few launches do.",
    "torch.optim.AdamW(model.parameters(), fused=True)  # or foreach=True",
    "torch.optim.AdamW",
)
ONE_TABLE = Remedy(
    "one_table",
    "Each table is looked up and updated by itself: as one table, with an offset for the rows of each, it is one call.",
    "rows = table(ids + offsets)  # nn.EmbeddingBag(sum(sizes), width, sparse=True), in place of a table a feature",
    "torch.nn.EmbeddingBag",
)
ALL_AT_ONCE = Remedy(
    "do_at_once",
    "The same is done to one small thing after another: stack them, and do it once.",
    "torch.func.vmap(function)(stacked)  # or torch._foreach_add_(tensors, others)",
    "torch.func.vmap",
)


class Seen(NamedTuple):
    """A cause at one place."""

    scene: Scene
    finding: Finding
    where: Where
    rows: Ints


def remedy_for(scene: Scene, finding: Finding, where: Where, rows: Ints) -> Remedy:
    """By the cause, a place, and what was seen of it there."""
    choose = CHOICES.get(finding.cause)
    remedy = (choose(Seen(scene, finding, where, rows)) if choose else None) or REMEDIES[finding.cause]
    return remedy._replace(code=remedy.code.replace("{workers}", str(scene.workers)))


def _of_a_late_rank(seen: Seen) -> Remedy | None:
    """What only one rank does can be shared, or written later; what all do can be dealt out evenly."""
    if _writes(seen):
        return CHECKPOINT
    if (loader_frame(seen.scene)[seen.rows] != NONE).all():
        return LATE_LOADER
    return ONE_FOR_ALL if (seen.scene.frame_of_one_rank[seen.rows] != NONE).all() else None


def _of_launches(seen: Seen) -> Remedy | None:
    """What would take them away has its price, which a script that runs once never earns back."""
    facts, why = seen.scene.timeline.facts, _no_graph_because(seen.scene)
    if facts.runs_once:
        return LAUNCHED_ONCE
    if (seen.scene.timeline.spans.kind == Kind.COLLECTIVE).any():
        return COMPILED_AMONG_RANKS
    return COMPILED._replace(advice=COMPILED.advice.format(why=why)) if why else None


def _no_graph_because(scene: Scene) -> str:
    """Why no graph can hold the whole step. One place of waiting a step may be its end: that one is no obstacle. Nor is
    what few steps launch beyond all others, as a loss that is printed now and then: it stays outside."""
    steps = np.append(scene.timeline.marks, len(scene.timeline))
    if len(np.unique(scene.last_launch[scene.is_sync & ~of_large_copy(scene)])) > scene.steps:
        return "it reads values of the GPU in its middle"
    launches = np.diff(np.concatenate([[0], np.cumsum(scene.command != NONE)])[steps])
    usual = 2 * np.count_nonzero(launches == launches.min()) > len(launches)
    return "" if usual else "its steps differ in their launches"


def _of_a_blocking_copy(seen: Seen) -> Remedy | None:
    spans = seen.scene.timeline.spans
    copies = seen.scene.is_copy & np.isin(seen.finding.culprit, seen.rows)
    back = copies & (spans.direction == Direction.DEVICE_TO_HOST)
    if spans.work[back].sum() > spans.work[copies & ~back].sum():
        return COPY_BACK_LATER
    if spans.size[copies].max(initial=0) <= STAGED_BYTES:
        return KEEP_ON_DEVICE
    return PINNED if seen.scene.timeline.facts.runs_once else None


def _of_a_sync(seen: Seen) -> Remedy | None:
    if seen.finding.edit.drop.any() and seen.finding.edit.drop[seen.rows].any():
        return SEND_TENSORS
    if "grad_scaler" in seen.where.library:
        return SCALER
    return next((remedy for pattern, remedy in SYNCS if pattern.search(seen.where.operator)), None)


def _of_a_collective(seen: Seen) -> Remedy | None:
    """By whose it is: gradients that travel too often or too late, parameters that FSDP gathers, or values."""
    scene, launch = seen.scene, seen.scene.launch[seen.rows]
    rows = np.where(launch == NONE, seen.rows, launch)  # of a collective that nobody launched here, itself
    of_gradients = scene.hands_over_gradients[rows].any()
    if seen.finding.edit.drop[rows].any():
        return SEND_ONCE if of_gradients else AVERAGE_ONCE
    if scene.within(Role.SHARDS)[rows].any():
        return SHARDED
    if of_gradients:
        return IN_BUCKETS
    if _sends_buffers(scene, int(rows[0])):
        return OWN_BUFFERS
    return NEEDED_AT_ONCE if _before_the_gradients(scene, int(rows[0])) else None


def _sends_buffers(scene: Scene, row: int) -> bool:
    """DDP broadcasts them before each forward pass, from within its own call."""
    frames, names = scene.timeline.frames, scene.timeline.names
    frame = int(scene.timeline.spans.frame[row])
    broadcasts = frame != NONE and "broadcast" in names[frames.name[frame]]
    while broadcasts and frame != NONE and frames.kind[frame] != FrameKind.PYTHON:
        if names[frames.name[frame]] == DDP_FORWARD:
            return True
        frame = int(frames.parent[frame])
    return False


def _before_the_gradients(scene: Scene, row: int) -> bool:
    """Whether a backward pass is still to come in its step, or to be finished; so it is also where there is none."""
    timeline = scene.timeline
    mine = timeline.rank_of_rows == timeline.rank_of_rows[row]
    backward = mine & scene.within(Role.BACKWARD)
    marks = np.append(timeline.marks[mine[timeline.marks]], len(timeline))
    return bool(backward[row : marks[np.searchsorted(marks, row, side="right")]].any()) or not backward.any()


def _writes(seen: Seen) -> bool:
    return "serialization" in seen.where.library


_MAKERS = {"arange", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randperm", "zeros"}
"""What makes a tensor of nothing but its arguments, and takes a device, as `torch.randn` does."""


def _of_a_maker(seen: Seen) -> Remedy | None:
    timeline, usual = seen.scene.timeline, REMEDIES["made_on_host"]
    frame = seen.scene.outermost(seen.scene.frames_with(Role.MAKES))[np.isin(seen.finding.culprit, seen.rows)]
    made = {timeline.names[name].rpartition("::")[2] for name in timeline.frames.name[frame[frame != NONE]].tolist()}
    if len(made) != 1 or (name := made.pop()) not in _MAKERS:
        return None
    return usual._replace(code=usual.code.replace("torch.randn(shape", f"torch.{name}(..."), api=f"torch.{name}")


CHOICES: dict[str, Callable[[Seen], Remedy | None]] = {
    "peer_late": _of_a_late_rank,
    "launch_bound": _of_launches,
    "exposed_collective": _of_a_collective,
    "made_on_host": _of_a_maker,
    "input_late": lambda seen: MORE_WORKERS if "_MultiProcessing" in seen.where.operator else None,
    "blocking_copy": _of_a_blocking_copy,
    "copy_not_overlapped": lambda seen: BESIDE if seen.scene.timeline.facts.runs_once else None,
    "host_sync": _of_a_sync,
    "host_work": lambda seen: CHECKPOINT if _writes(seen) else None,
}
"""Of causes with more than one remedy, who chooses by what was seen; none where the usual one fits."""


LESSONS = (
    ("nonzero|index|masked_select|unique|where", "how many there are is known only to the GPU, so Python waits for it"),
    ("Synchronize", "Python waits until all that was launched is done"),
    ("item|_local_scalar_dense|is_nonzero|equal", "Python needs a value, so it waits until the GPU has computed it"),
)
"""What a reader should learn of a wait, by what was called."""


def lesson(cause: str, where: Where) -> str:
    """Of a line in a script without steps, where a wait costs nothing now and would in a loop."""
    if cause == "host_sync":
        told = (sentence for pattern, sentence in LESSONS if re.search(pattern, where.operator))
        return next(told, "Python needs what the GPU computes, so it waits until that is done")
    return {
        "blocking_copy": "Python waits until all of it is copied",
        "copy_not_overlapped": "kernels that were launched after it wait until all of it is copied",
        "allocator": "memory is requested from the driver once, and kept for the next time",
    }.get(cause, "")


def what_happened(scene: Scene, finding: Finding) -> str:
    """A sentence with its counts. Durations are left to the report."""
    spans, of_a_rank = scene.timeline.spans, scene.steps * len(scene.timeline.ranks)
    copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
    count, said = finding.count / of_a_rank, SAID[finding.cause]
    return (said if isinstance(said, str) else said(scene, finding)).format(
        often=times(count),
        launches="1 launch" if round(count) == 1 else f"{count:,.0f} launches",
        moved=_bytes(float(spans.size[copies].sum()) / of_a_rank),
    )


def _copied(scene: Scene, finding: Finding) -> str:
    spans = scene.timeline.spans
    copies = (finding.edit.lane != SideLane.STAY) & (spans.kind == Kind.COPY)
    pageable = scene.timeline.facts.runs_once and not spans.pinned[copies].any()
    why = ": the memory is not pinned, so non_blocking=True changes nothing" if pageable else ""
    return f"{{moved}} a step are copied while Python waits ({{often}}){why}."


def _waited_for_input(scene: Scene, finding: Finding) -> str:
    if not scene.by_workers.any():
        return "The training process prepares its own batches, and the GPU waits for them."
    waits = np.unique(scene.timeline.rank_of_rows[finding.rows]).tolist()
    if len(waits) < len(scene.timeline.ranks):
        return f"Rank {waits[0]} waits for its loader's workers, and the other ranks wait for it."
    return "The loop waits for the loader's workers, and the GPU waits for the loop."


def _came_late(scene: Scene, finding: Finding) -> str:
    late = sorted(one.rank for one in late_ranks(scene, finding))
    if len(late) == 1:
        who = f"Rank {late[0]} comes"
    elif len(late) <= 4:
        who = f"Ranks {', '.join(map(str, late[:-1]))} and {late[-1]} come"
    else:
        who = f"{len(late)} ranks come"
    return f"{who} late to the collectives, and the others wait there."


def _travelled(_: Scene, finding: Finding) -> str:
    if finding.edit.drop.any():
        return "The gradients travel after every micro-batch, though only their sum is used ({often} too often)."
    return "Collectives ({often}) run after the computation instead of beside it."


SAID: dict[str, str | Callable[[Scene, Finding], str]] = {
    "host_sync": "Python waits for the GPU {often}, and then the GPU has nothing to do until Python has launched more.",
    "blocking_copy": _copied,
    "copy_not_overlapped": "{moved} a step are copied before the kernels instead of beside them ({often}).",
    "input_late": _waited_for_input,
    "made_on_host": "A tensor is made on the CPU and then copied to the GPU ({often}).",
    "launch_bound": "{launches} a step: the GPU is done with each before Python has launched the next.",
    "allocator": "PyTorch asks the driver for memory, or gives it back, {often}; some of these calls stop the GPU.",
    "host_work": "The training thread does other work between its launches, and the GPU has nothing to do meanwhile.",
    "peer_late": _came_late,
    "exposed_collective": _travelled,
}


def times(count: float) -> str:
    """Once, twice, 12 times a step."""
    if count < 2 / 3:
        return f"once in {round(1 / max(count, 1e-3))} steps"
    rounded = round(count)
    return {1: "once a step", 2: "twice a step"}.get(rounded, f"{rounded} times a step")


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
