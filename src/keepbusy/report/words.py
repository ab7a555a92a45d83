"""What causes, fixes and places are called in reports, and how names that are not ours are shown."""

from __future__ import annotations

from typing import NamedTuple

from keepbusy.explain.diagnosis import Where


def tame(text: str, limit: int = 0) -> str:
    """Names come from a file: whatever could steer a terminal becomes a mark, and what is too long loses its middle."""
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    if not limit or len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def spot(where: Where, limit: int = 60) -> str:
    """A place, never more exactly than it is known: `train.py:31`, or `about train.py:14 in main`."""
    place = tame(str(where))
    if not where.file:  # `aten::item, after aten::mm`, without the last parts where there is no room for them
        while len(place) > limit and ", " in place:
            place = place.rpartition(", ")[0]
        return cut(place, limit)
    place = place if len(place) <= limit else f"…{place[len(place) - limit + 1 :]}"
    if where.exact:
        return place
    return f"about {place}" + (f" in {tame(where.function, 40)}" if where.function else "")


def at(where: Where, limit: int = 60) -> str:
    """The same within a sentence: ` at train.py:31`, ` about train.py:14 in main`."""
    place = spot(where, limit)
    return f"{leading(place)}{place}"


def leading(place: str) -> str:
    """What stands between a sentence and a place, which may begin with a word of its own."""
    return " " if place.startswith(("about ", "in ", "between ", "after ", "before ")) else " at "


def cut(text: str, limit: int) -> str:
    """What is too long loses its end."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


# What causes and fixes are called


class Look(NamedTuple):
    """How reports show one place of the ledger: its short name, a sentence, its colour, and a letter in its place."""

    name: str
    sentence: str
    colour: str
    letter: str = "·"


LOOKS = {
    "computing": Look("computing", "The GPU computes", "#4fa870", "█"),
    "copying": Look("copying", "The GPU copies, and computes nothing meanwhile", "#45a0a8", "▓"),
    "collective": Look("collective", "Ranks exchange data, and nothing is computed meanwhile", "#5b8fd4", "▒"),
    "host_sync": Look("host sync", "Python waits for the GPU, and then the GPU waits for Python", "#e06c62"),
    "blocking_copy": Look(
        "blocking copy", "Python waits for a copy, and the GPU does nothing but copy meanwhile", "#e69a4c"
    ),
    "copy_not_overlapped": Look(
        "copy in line", "The GPU copies first and computes afterwards, instead of doing both at once", "#d8bb55"
    ),
    "input_late": Look("late input", "The GPU waits for the next batch", "#c07fd0"),
    "made_on_host": Look("made on host", "Tensors are made on the CPU and copied to the GPU", "#e288b0"),
    "launch_bound": Look(
        "launch-bound", "The GPU finishes its kernels sooner than Python can launch new ones", "#cf8064"
    ),
    "allocator": Look("allocator", "PyTorch asks the driver for memory again and again", "#b0a06a"),
    "host_work": Look("host work", "Python does other work in the training loop, and the GPU waits for it", "#b58b70"),
    "peer_late": Look("late peer", "A rank is late and the others wait for it", "#9d90dc"),
    "exposed_collective": Look(
        "exposed collective", "Ranks exchange data, and nothing is computed meanwhile", "#7aa5e2"
    ),
    "pipeline_bubble": Look("bubble", "Stages of a pipeline wait for each other", "#b7c7dd", "o"),
    "unknown": Look("unknown", "Not explained", "#8b9099", "?"),
}


def look(place: str) -> Look:
    """Also of a place that a later version may know."""
    return LOOKS.get(place) or Look(place, place, "#8b9099")


_FIXES = {
    "accumulate": "let gradients travel once a step",
    "align_ranks": "give every rank the same work",
    "average_once": "average gradients once a step",
    "call_less_often": "call it less often",
    "collect_between_epochs": "collect garbage between epochs",
    "compile": "torch.compile",
    "compute_on_gpu": "compute it on the GPU",
    "compute_meanwhile": "compute something else meanwhile",
    "copy_beside": "copy on a stream of its own",
    "cut_into_micro_batches": "cut the batch into more micro-batches",
    "decide_on_gpu": "decide on the GPU",
    "do_at_once": "one call in place of the loop",
    "drop_checks": "let distributions check nothing",
    "drop_sync": "drop the synchronization",
    "expand_segments": "let the allocator's segments grow",
    "fuse_optimizer": "use a fused optimizer",
    "gather_ahead": "let FSDP gather ahead",
    "graph": "capture a CUDA graph",
    "keep_activations": "keep the activations on the GPU",
    "keep_memory": "leave the allocator its memory",
    "keep_on_device": "keep it on the GPU",
    "keep_parameters_on_gpu": "keep the parameters on the GPU",
    "keep_shapes": "torch.where in place of a mask",
    "launch_less": "launch less",
    "make_on_device": "make the tensor on the GPU",
    "move_off_the_loop": "take the host's work out of the loop",
    "one_table": "one table in place of many",
    "send_together": "send small tensors as one",
    "overlap_collectives": "overlap communication with the backward pass",
    "overlap_stages": "let micro-batches follow each other",
    "pad_to_few_lengths": "pad to a few lengths",
    "pin_memory": "pin the memory",
    "prefetch": "prefetch batches",
    "prepare_in_workers": "give the loader more workers",
    "share_among_workers": "give every worker a share of the data",
    "print_copy": "print a copy on the CPU",
    "read_at_once": "read all values at once",
    "readback": "read the value later",
    "save_later": "write the checkpoint in the background",
    "send_from_gpu_to_gpu": "send from GPU to GPU",
    "send_tensors": "send tensors in place of objects",
    "share_among_ranks": "share the work among the ranks",
    "size_buckets": "try other DDP buckets",
    "turn_off_broadcasts": "turn off DDP's broadcasts of buffers",
    "tell_sizes": "tell PyTorch the size",
    "work_a_round_ahead": "let ranks work a round ahead of each other",
    "use_processes": "use processes in place of a thread",
}


def fix(named: str) -> str:
    """A fix in words that users of PyTorch say, also with its place: what stands for `readback at train.py:31`."""
    name, at_place, place = named.partition(" at ")
    return f"{_FIXES.get(name, name)}{at_place}{place}"


def files(sources: tuple[str, ...]) -> str:
    """One file by its name, several by their number."""
    if len(sources) == 1:
        return tame(sources[0].replace("\\", "/").rpartition("/")[2], 60)
    return f"{len(sources)} traces" if sources else ""
