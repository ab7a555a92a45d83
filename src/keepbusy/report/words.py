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
    """A place, never more exactly than it is known: `train.py:31`, or `near train.py:14 in main`."""
    place = tame(str(where))
    if not where.file:  # `aten::item, after aten::mm`, without the last parts where there is no room for them
        while len(place) > limit and ", " in place:
            place = place.rpartition(", ")[0]
        return cut(place, limit)
    place = place if len(place) <= limit else f"…{place[len(place) - limit + 1 :]}"
    if where.exact:
        return place
    return f"near {place}" + (f" in {tame(where.function, 40)}" if where.function else "")


def at(where: Where, limit: int = 60) -> str:
    """The same within a sentence: ` at train.py:31`, ` near train.py:14 in main`."""
    place = spot(where, limit)
    return f"{leading(place)}{place}"


def leading(place: str) -> str:
    """What stands between a sentence and a place, which may begin with a word of its own."""
    return " " if place.startswith(("near ", "in ", "between ", "after ", "before ")) else " at "


def cut(text: str, limit: int) -> str:
    """What is too long loses its end."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def of_a_script(text: str) -> str:
    """What is said of an iteration, of a script that has none."""
    return text.replace(" per iteration", "").replace(" one iteration later", " later")


# What causes and fixes are called


class Look(NamedTuple):
    """How reports show one place of the ledger: its short name, a sentence, its colour, and a letter in its place."""

    name: str
    sentence: str
    colour: str
    letter: str = "·"


LOOKS = {
    "computing": Look("computing", "The GPU computes", "#4fa870", "█"),
    "copying": Look("copying", "The GPU only copies", "#45a0a8", "▓"),
    "collective": Look("collective", "Communication does not overlap with computing", "#5b8fd4", "▒"),
    "host_sync": Look("host sync", "Python blocks on the GPU, which then idles", "#e06c62"),
    "blocking_copy": Look("blocking copy", "Python waits for copies to finish", "#e69a4c"),
    "copy_not_overlapped": Look("copy not overlapped", "Copies do not overlap with computing", "#d8bb55"),
    "input_late": Look("late input", "The GPU waits for the next batch", "#c07fd0"),
    "made_on_host": Look("made on host", "Tensors are created on the CPU and copied to the GPU", "#e288b0"),
    "launch_bound": Look("launch-bound", "The GPU finishes kernels faster than Python launches them", "#cf8064"),
    "allocator": Look("allocator", "PyTorch requests memory from the driver again and again", "#b0a06a"),
    "host_work": Look("host work", "The GPU waits for CPU work in the loop", "#b58b70"),
    "peer_late": Look("late peer", "One rank is late; the others wait for it", "#9d90dc"),
    "exposed_collective": Look("exposed collective", "Communication does not overlap with computing", "#7aa5e2"),
    "pipeline_bubble": Look("pipeline bubble", "Pipeline stages wait for each other", "#b7c7dd", "o"),
    "unknown": Look("unknown", "Not explained", "#8b9099", "?"),
}


def look(place: str) -> Look:
    """Also of a place that a later version may know."""
    return LOOKS.get(place) or Look(place, place, "#8b9099")


_FIXES = {
    "accumulate": "send gradients once per step",
    "align_ranks": "give every rank the same work",
    "average_once": "average gradients once per step",
    "call_less_often": "call it less often",
    "collect_between_epochs": "collect garbage between epochs",
    "compile": "torch.compile",
    "compute_on_gpu": "compute it on the GPU",
    "compute_meanwhile": "compute during the transfer",
    "create_on_gpu": "create the tensor on the GPU",
    "copy_beside": "copy on a separate stream",
    "cut_into_micro_batches": "use more micro-batches",
    "decide_on_gpu": "decide on the GPU",
    "do_at_once": "replace the loop by one call",
    "drop_checks": "turn off distribution checks",
    "drop_sync": "remove the synchronization",
    "expand_segments": "use expandable segments",
    "fuse_optimizer": "use a fused optimizer",
    "shard_blocks": "shard blocks, not layers",
    "gather_ahead": "prefetch FSDP's all-gathers",
    "graph": "capture as a CUDA graph",
    "keep_activations": "keep activations on the GPU",
    "keep_memory": "keep the allocator's memory",
    "keep_on_device": "keep the data on the GPU",
    "keep_parameters_on_gpu": "keep parameters on the GPU",
    "keep_shapes": "torch.where instead of a mask",
    "launch_less": "launch fewer kernels",
    "make_on_device": "create the tensor on the GPU",
    "move_off_the_loop": "move CPU work out of the loop",
    "one_table": "merge the embedding tables",
    "send_together": "send small tensors as one",
    "overlap_collectives": "overlap gradients with backward",
    "overlap_stages": "overlap the pipeline stages",
    "pad_to_few_lengths": "pad to a few lengths",
    "pin_memory": "pin the memory",
    "prefetch": "prefetch batches to the GPU",
    "prepare_in_workers": "use more loader workers",
    "prepare_once": "prepare the data once",
    "prepare_in_workers without persistent_workers": "use more loader workers, started in each epoch",
    "share_among_workers": "split the data among workers",
    "print_copy": "print a copy on the CPU",
    "read_at_once": "read all values in one call",
    "readback": "read the value later",
    "replace_operation": "use another operation",
    "save_later": "save in the background",
    "send_from_gpu_to_gpu": "send from GPU to GPU",
    "send_tensors": "send tensors, not objects",
    "share_among_ranks": "share the work among ranks",
    "size_buckets": "try other DDP bucket sizes",
    "turn_off_broadcasts": "turn off DDP buffer broadcasts",
    "tell_sizes": "pass the output size",
    "use_processes": "use processes, not threads",
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
