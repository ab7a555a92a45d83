"""The rules with a threshold, by name: `benchmarks/ablation.py` switches them off one at a time.

A rule stays if at least two independent measured programs need it; docs/explanation/rules.md says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

RULES = {
    "slower_host": "Where the most that recording can cost is not enough, the rest of the host was slower altogether.",
    "usual_cost": "Where the device sets the pace, recording is taken to have cost the host what it usually does.",
    "host_seen_alone": "The host is no slower than plain steps have shown it where nothing held it up.",
    "device_within_step": "No rank's device has more to do in a step than the plain step takes.",
    "fed_as_usual": "A loader is as slow as all plain steps show it, whatever it had in store when it was recorded.",
    "own_bandwidth": "A pinned copy is as fast as this run's own large pinned copies.",
    "even_hosts": "Hosts of ranks that are not late are as quick as they usually are, over all ranks and steps.",
    "reads_in_a_loop": "Eight reads of one place, with six launches or fewer between, are computed and read together.",
    "round_trip": "Work of 0.1 ms between a read and a copy back to the device is work in its own right.",
    "reader_leaves": "The operator that reads a value leaves together with its sync.",
    "long_work": "Host work of a millisecond without a launch is work in its own right, not the price of launches.",
    "own_calls": "So is a call of the program's own that lasts 0.3 ms and launches nothing.",
    "graph_gap": "A graph saves 0.87 µs of the device for each of its kernels.",
    "handover": "A batch that is ready costs the training process 0.2 ms.",
    "take_from_workers": "What the loop does to take a batch that workers prepared stays.",
    "unequal_devices": "Device work that is a tenth and 0.5 ms more on one rank is shared out.",
    "syncs_of_the_late": "Syncs that only the late rank makes leave with what it does there.",
    "one_fix_alone": "All fixes together are no slower than the first one alone.",
    "ready_batches": "A loader that plain steps do not wait for had its batches ready in the recorded steps, too.",
    "moved_work": "Where work that was moved aside sets the pace, what is left of the wait is still its cause's.",
}

_off: set[str] = set()
_asked: set[str] = set()


def rule(name: str) -> bool:
    """Whether the rule holds. Asked only where the answer changes something."""
    _asked.add(name)
    return name not in _off


@contextmanager
def without(*names: str) -> Iterator[None]:
    """For as long as this lasts, these rules do not hold."""
    if unknown := set(names) - set(RULES):
        raise KeyError(f"there is no rule named {', '.join(sorted(unknown))}")
    _off.update(names)
    try:
        yield
    finally:
        _off.difference_update(names)


def asked() -> set[str]:
    """The rules that were asked since this was last called."""
    names = set(_asked)
    _asked.clear()
    return names
