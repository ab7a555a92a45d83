"""For each cause, what to do about it: the fix's name, a sentence, a line of code, and what that line uses."""

from __future__ import annotations

import re
from typing import NamedTuple

from keepbusy.explain.diagnosis import Where


class Seen(NamedTuple):
    """What decides between remedies of one cause."""

    unequal: bool = False  # the late rank's device has more to do than its peers'
    alone: bool = False  # what the late rank does there, no other rank does
    homeward: bool = False  # most bytes come from the device
    small: bool = False  # no copy is worth calling one
    again: bool = False  # the same gradients travel several times a step
    peers: bool = False  # other ranks take part


class Remedy(NamedTuple):
    """What to do about a cause."""

    fix: str
    advice: str
    code: str
    api: str


REMEDIES = {
    "host_sync": Remedy(
        "read_later",
        "Let the value come home while the host goes on, and read it a step later.",
        "log.append(keepbusy.readback(loss))  # float(log[-2]) a step later",
        "keepbusy.readback",
    ),
    "blocking_copy": Remedy(
        "prefetch_input",
        "Let batches be fetched ahead, through pinned memory, so that the copy runs beside the compute.",
        "for batch in keepbusy.prefetch(loader):  # DataLoader(..., pin_memory=True)",
        "keepbusy.prefetch",
    ),
    "copy_not_overlapped": Remedy(
        "prefetch_input",
        "Fetch batches ahead on a stream of its own, so that the copy runs beside the compute.",
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
        "Make the tensor on the device, where it is needed.",
        'torch.randn(shape, device="cuda")  # no copy, no host work',
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
        "Move this work to the loader's workers or to the device, or do it less often.",
        "DataLoader(..., num_workers={workers}, collate_fn=...)  # not in the training loop",
        "torch.utils.data.DataLoader",
    ),
    "peer_late": Remedy(
        "align_ranks",
        "Take this off the late rank's loop, or let a thread do it: all other ranks wait for it.",
        "keepbusy.save_later(state, path)  # a checkpoint; else the same share on every rank",
        "keepbusy.save_later",
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
            "A mask has a shape that only the device knows: compute on everything and choose with where.",
            "y = torch.where(mask.unsqueeze(-1), changed, x)  # in place of y[mask] = ...",
            "torch.where",
        ),
    ),
    (
        re.compile(r"unique|repeat_interleave|bincount"),
        Remedy(
            "tell_sizes",
            "The size of the result is known only on the device: give it, or keep this step on the host.",
            "torch.repeat_interleave(x, repeats, output_size=total)",
            "torch.repeat_interleave",
        ),
    ),
    (
        re.compile(r"Synchronize"),
        Remedy(
            "drop_sync",
            "Drop the synchronisation; events time a phase without stopping the host.",
            "torch.cuda.Event(enable_timing=True)  # in place of torch.cuda.synchronize()",
            "torch.cuda.Event",
        ),
    ),
)


MORE_WORKERS = Remedy(
    "prepare_in_workers",
    "Give the loader four times the workers, as far as there are cores, and let them fetch further ahead.",
    "DataLoader(..., num_workers=4 * today, prefetch_factor=4, pin_memory=True, persistent_workers=True)",
    "torch.utils.data.DataLoader",
)


COMPILED = Remedy(
    "capture_graph",
    "Compile the model: fewer launches, and those between collectives replayed as graphs.",
    'torch.compile(model, mode="reduce-overhead")  # and fused=True for the optimizer',
    "torch.compile",
)


SEND_ONCE = Remedy(
    "send_once",
    "Accumulate the gradients of all micro-batches, and let them travel with the last one.",
    "for micro in keepbusy.accumulate(model, loader, count=4): ...  # if micro.last: optimizer.step()",
    "keepbusy.accumulate",
)


EQUAL_SHARES = Remedy(
    "align_ranks",
    "Give every rank the same work: the others wait for the late one at each collective.",
    "DistributedSampler(dataset, shuffle=True)  # batches of equal cost on every rank",
    "torch.utils.data.DistributedSampler",
)


ONE_FOR_ALL = Remedy(
    "align_ranks",
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


BRING_LATER = Remedy(
    "bring_home_later",
    "Let it come home beside the compute, and use it a step later; or compute on the device.",
    "home = keepbusy.readback(out)  # and home.tensor a step later",
    "keepbusy.readback",
)
STAYS_SMALL = Remedy(
    "keep_on_device",
    "So little data costs its wait, not its copy: make it on the device, or once before the loop.",
    'torch.randperm(n, device="cuda")  # or weights = torch.tensor([...], device="cuda") before the loop',
    "torch.randperm",
)
SCALER = Remedy(
    "fuse_optimizer",
    "GradScaler reads whether gradients overflowed; a fused optimizer checks that on the device.",
    "torch.optim.AdamW(model.parameters(), fused=True)  # or bfloat16, which needs no scaler",
    "torch.optim.AdamW",
)


def remedy_for(cause: str, where: Where, seen: Seen) -> Remedy:
    """By the cause, and by what was seen of it."""
    match cause:
        case "peer_late" if seen.unequal:
            return ONE_FOR_ALL if seen.alone else EQUAL_SHARES
        case "launch_bound" if seen.peers:
            return COMPILED
        case "exposed_collective" if seen.again:
            return SEND_ONCE
        case "input_late" if "_MultiProcessing" in where.operator:
            return MORE_WORKERS
        case "blocking_copy" if seen.homeward:
            return BRING_LATER
        case "blocking_copy" if seen.small:
            return STAYS_SMALL
        case "host_sync" if "grad_scaler" in where.library:
            return SCALER
        case "host_sync":
            found = (remedy for pattern, remedy in SYNCS if pattern.search(where.operator))
            return next(found, REMEDIES[cause])
    return REMEDIES[cause]
