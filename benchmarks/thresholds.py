"""Every rule of what is recorded, read and explained: what it says, and how it is switched off. Most are thresholds;
where no constant does it, the function that follows the rule is put aside.

`ablation.py` switches them off one at a time. A test holds this table against the sources: a constant that is new there
has to be put here, among the thresholds or among the bounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

INFINITE = 1 << 60


def _unchanged(timeline: Any, *_: Any) -> Any:
    """In place of a function that follows a rule."""
    return timeline


@dataclass(frozen=True)
class Threshold:
    """A constant of a module, or a function, what the rule says, and with which value it says nothing."""

    constant: str
    off: Any
    says: str

    @property
    def name(self) -> str:
        return self.constant.lower().lstrip("_")


EXPLAINED = {
    "keepbusy.explain.fix_search": (
        Threshold("AS_GOOD", 1.0, "Of fixes that save nearly the same the least general one comes first."),
    ),
    "keepbusy.fixes.definition": (
        Threshold("GENERAL", {}, "Fixes of launches and of host work change a program more than others do."),
    ),
    "keepbusy.fixes.repeated_calls": (
        Threshold("FEWEST_REPETITIONS", INFINITE, "Eight rounds or more of one call could be done at once."),
    ),
    "keepbusy.explain.run_plan": (
        Threshold(
            "_at_other_thread",
            _unchanged,
            "Where another thread's Python took half of what a row saves, the row stands at its line.",
        ),
        Threshold("_shared_evenly", _unchanged, "Ranks that meet only after a loop wait for the one it takes longest."),
    ),
    "keepbusy.timeline.model": (
        Threshold("STAGED_BYTES", 0, "A copy of 64 KB costs about a launch."),
        Threshold("LONGEST_HANDOVER", INFINITE, "A batch that takes 0.3 ms to be taken from the workers was late."),
    ),
    "keepbusy.causes.late_ranks": (
        Threshold("UNEQUAL_TIMES", INFINITE, "Device work is unequal where a rank has a tenth more than its peers."),
        Threshold("LATE_BY", 0, "A host is late where it takes a millisecond longer than its peers."),
    ),
    "keepbusy.causes.late_input": (
        Threshold("TIMES_AS_MANY", 1, "A loader with workers is given four times as many."),
    ),
    "keepbusy.causes.cause_inputs": (
        Threshold("IN_A_ROW", INFINITE, "Eight reads of one place in a row are computed and read together, ..."),
        Threshold("LAUNCHES_BETWEEN", INFINITE, "... where there are six launches or fewer between them."),
        Threshold("HEAVY", INFINITE, "Host work of a millisecond is work in its own right, not a launch's price."),
        Threshold("CALL_OF_ITS_OWN", INFINITE, "So is a call of the program's own of 0.3 ms that launches nothing."),
        Threshold(
            "PRICE_OF_A_CALL", 0, "What takes less than 0.1 ms is what a call costs, and no work of the program's own."
        ),
    ),
    "keepbusy.timeline.edit": (
        Threshold("GRAPH_SAVES", 0, "A graph saves 0.87 µs of the device for each of its kernels."),
    ),
    "keepbusy.fixes.capture": (
        Threshold("FEWEST_LAUNCHES", INFINITE, "A graph of fewer than eight launches saves nothing."),
    ),
    "keepbusy.fixes.cpu_work": (
        Threshold(
            "_takes_as_long_as_the_collector",
            lambda _: False,
            "Host work that takes half to twice of what Python's garbage collector does in a step is the collector's.",
        ),
    ),
    "keepbusy.explain.plain": (
        Threshold("even_hosts", _unchanged, "Hosts of ranks that are not late are as quick as they usually are."),
        Threshold("TELLING_CHANGE", 0.0, "A step that recording changes by less than 3% tells nothing of its cost."),
        Threshold("LARGEST_STRETCH", 0.0, "A line stands for no more than twenty times what was recorded of it."),
        Threshold(
            "SLOWEST_HOST", 1.0, "Where the largest cost of recording is not enough, the host was slower altogether."
        ),
        Threshold(
            "_no_slower_than_marks",
            lambda _, factor, speed: (factor, speed),
            "The host is as quick as marks saw it with nothing to wait for.",
        ),
    ),
    "keepbusy.timeline.steps": (
        Threshold("FEWEST_PROVEN", INFINITE, "Iterations that compare a graph stand for none, where four others do."),
        Threshold("_RARE", 0.0, "Iterations that take far longer stand apart where they are fewer than a twentieth."),
        Threshold(
            "_FAR_LONGER", INFINITE, "Iterations of three times the median have their share of those that are replayed."
        ),
        Threshold("OTHER_PART", INFINITE, "A step has parts where one of them launches a tenth more than another."),
        Threshold("LEAVES_LOOP", INFINITE, "A turn with four times the launches of others has left its loop."),
    ),
}
"""Of what is made of a recording: measured on the kept recordings whose fixed programs were timed."""

MERGED = {
    "keepbusy.traces.many_ranks": (
        Threshold("LATE_SHARE", 0.0, "Of many ranks one is late if it takes 3% of a step longer than its kind."),
    ),
}
"""Of reading ranks into one timeline: measured on the recordings of several ranks, and on traces of many."""

VIRTUAL = {
    "keepbusy.program.loops.step_loop": (
        Threshold("PATIENCE", INFINITE, "Who steps eight times while another does not is no part of its step."),
        Threshold("HOLDS_TRAINING", 0.0, "A loop with fewer than half of the backward passes is part of an iteration."),
        Threshold("WORKING_SHARE", 0.0, "A loop with half of the GPU's work is what the program is for, ..."),
        Threshold("FEWEST_ITERATIONS", 1, "... if it iterates six times."),
    ),
    "keepbusy.program.loops.run_tree": (
        Threshold("AGREEMENT", 0.0, "A place is a line at which the program was three fifths of the time."),
    ),
    "keepbusy.program.loops.slow_iterations": (
        Threshold("SLOW_DEVIATIONS", 0.0, "A slow iteration is eight usual deviations longer than the median."),
        Threshold("SLOW_SHARE", 0.0, "A slow iteration is longer than the median by half of it."),
        Threshold("BEAT_SHARE", 0.0, "Three in four of the distances of a beat are the usual one, or several of it."),
        Threshold("BEAT_LASTS", 0.0, "A beat goes on for a quarter of the iterations: else it was a burst."),
    ),
    "keepbusy.program.loops.run_loops": (
        Threshold("STAY", INFINITE, "A function that lasts 60 ms may hold loops of the run, ..."),
        Threshold("STAY_SHARE", 0.0, "... and in a short run one that lasts a twentieth of it."),
    ),
}
"""Of a run on a virtual GPU: measured on programs that the ablation runs on one."""
THRESHOLDS = EXPLAINED | MERGED | VIRTUAL

BOUNDS = {
    "keepbusy.program.loops.stack_samples": (
        *("SAMPLE_INTERVAL", "TIMES_ITS_COST", "GROWTH", "BESIDE_EVERY", "KEPT_SAMPLES", "DEEPEST", "PATIENCE"),
    ),
    "keepbusy.program.loops.codes": ("IMPORTING",),
    "keepbusy.program.loops.iteration_counts": (
        *("IS_COUNTED", "CALLS_A_SECOND", "CALLS_IN_A_ROW", "LIMIT", "VIRTUAL_LIMIT", "KEPT_ITERATIONS"),
    ),
    "keepbusy.program.loops.step_loop": ("LOOP_IS_WORTH", "KEPT_ITERATIONS", "FEWEST_MARKS"),
    "keepbusy.program.loops.run_tree": (
        *("KEPT_LINES", "KEPT_KINDS", "STRETCHES", "SHORTEST_PART", "SLOW_ITERATIONS_MATTER", "FEWEST_ITERATIONS"),
    ),
    "keepbusy.program.loops.slow_iterations": ("COMPARED_ITERATIONS",),
    "keepbusy.explain.fix_search": ("LARGEST_SET", "CANDIDATES", "PLACES_APART", "REPLAYED_ROWS"),
    "keepbusy.fixes.capture": ("COMPARED_FIRST", "MOST_GRAPHS"),
    "keepbusy.fixes.definition": (),
    "keepbusy.fixes.cpu_work": (),
    "keepbusy.fixes.launching": ("COMPILED_AWAY", "MOST_OF_IT"),
    "keepbusy.fixes.repeated_calls": ("MERGED_WORK",),
    "keepbusy.explain.run_plan": ("CAPTURING", "COMPILING", "UNUSED", "A_SECOND"),
    "keepbusy.timeline.edit": ("UNLIMITED",),
    "keepbusy.explain.step_analysis": (
        *("NOISE", "EXACT_ORDERS", "SAMPLED_ORDERS", "SHARE_IN_LEDGER", "SITES_REPLAYED", "SITES_SHOWN"),
        "HALF_OF_A_GAP",
    ),
    "keepbusy.causes.places": ("ROWS_NEARBY",),
    "keepbusy.causes.late_ranks": ("WORTH_NAMING",),
    "keepbusy.causes.late_input": (),
    "keepbusy.causes.cause_inputs": (),
    "keepbusy.explain.plain": (
        *("USUAL_COST", "FACTOR_TOLERANCE", "LONGEST_QUEUE", "LARGEST_COST", "LUCKIEST_RECORDING", "UNREACHABLE"),
    ),
    "keepbusy.causes.copies": ("USUAL_BANDWIDTH", "SETUP"),
    "keepbusy.timeline.replay": ("STEPS", "MOST_ROWS"),
    "keepbusy.timeline.model": (
        *("NONE", "EVERY_LANE", "LARGEST_RANK", "PENDING_LIMIT", "NEVER", "CONTINUED"),
        *("TYPICAL_GAP", "TYPICAL_LATENCY", "MEASURED_LAGS", "EARLY_RETURN"),
    ),
    "keepbusy.timeline.ranks": ("SKEW", "SAME_CLOCK", "OTHER_CLOCK", "MOST_SHIFT", "SHORTEST_LOOP", "RANKS_DIFFER"),
    "keepbusy.timeline.run_facts": ("NONE", "SIMULATED_ITERATIONS", "USUAL_PREFETCH", "USUAL_WORKERS"),
    "keepbusy.timeline.steps": ("NOISE_OF_A_SCRIPT", "SAMPLED_ROWS"),
    "keepbusy.traces.many_ranks": ("KEPT", "KEPT_STRAGGLERS"),
}
"""No rule that could be wrong: what bounds the cost of looking or says how much is kept and told, what was measured of
PyTorch, CUDA and clocks, what is refused as damaged, and from where on anything is more than noise."""


def all_of(table: dict[str, tuple[Threshold, ...]]) -> dict[str, tuple[str, Threshold]]:
    """By name, with the module."""
    return {one.name: (module, one) for module, thresholds in table.items() for one in thresholds}


@contextmanager
def switched_off(name: str) -> Iterator[None]:
    """In its own module, and wherever that one's constant was imported by name."""
    module, threshold = all_of(THRESHOLDS)[name]
    held = getattr(import_module(module), threshold.constant)
    owners = [
        one
        for path, one in list(sys.modules.items())
        if path.startswith("keepbusy.") and getattr(one, threshold.constant, None) is held and one is not None
    ]
    for one in owners:
        setattr(one, threshold.constant, threshold.off)
    try:
        yield
    finally:
        for one in owners:
            setattr(one, threshold.constant, held)
