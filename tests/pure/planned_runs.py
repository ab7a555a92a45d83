"""Programs, loaders and trees of runs that several files of tests plan."""

from __future__ import annotations

from typing import Any

from build import MB, MS, Run

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import PlannedFix, Prediction
from keepbusy.timeline.run_facts import (
    FIRST_USE,
    LINE,
    LOOP,
    RUN,
    LineTime,
    LoaderUse,
    Part,
    SlowIterations,
)

ITEM = ["aten::item", "aten::_local_scalar_dense"]
READ, OTHER, PREPARE = "read.py(1): read", "other.py(2): read", "data.py(3): tokenize"


def two_reads(run: Run) -> None:
    """Whoever makes one of them later waits at the other one."""
    run.launch([1_000] * 9).sync(at=[READ, *ITEM]).sync(at=[OTHER, *ITEM]).work(2_000)


def busy(run: Run) -> None:
    run.work(100).launch([1_000] * 9).copy(MB, 100, pinned=True, blocking=False, stream=8)


def places(one: PlannedFix) -> list[str]:
    return [str(place) for place in one.where]


def use(**given: Any) -> LoaderUse:
    """Three workers, 430 ms a batch, 84 ms the rest of a turn: the program waits 60 ms for each of a hundred."""
    usual: dict[str, Any] = {"place": "train.py:40", "workers": 3, "prefetch": 2, "batches": 100, "waited": 6_430 * MS}
    times = {"began": 430 * MS, "in_worker": 430 * MS, "looped": 14_400 * MS, "cores": 16}
    return LoaderUse(**(usual | times | given))


def run_of(time: float, busy: float) -> Part:
    return Part(RUN, source="train.py", time=round(time * MS), busy=round(busy * MS), turns=1, turn=round(time * MS))


def shortened(step: int, after: int) -> PlannedFix:
    predicted = Prediction(after * MS, after * MS, after * MS)
    return PlannedFix("prefetch", (Where("train.py", 44),), ("blocking_copy",), (step - after) * MS, predicted, 0)


TREE = Part(
    RUN,
    source="train.py",
    time=26_000 * MS,
    busy=4_000 * MS,
    turns=1,
    turn=26_000 * MS,
    parts=(
        Part(FIRST_USE, time=2_000 * MS, busy=0, turns=1, lines=(LineTime("train.py:9", 2_000 * MS, 0),)),
        Part(
            LOOP,
            place="train.py:64",
            source="for batch in loader:",
            function="main",
            began=2_000 * MS,
            time=24_000 * MS,
            busy=4_000 * MS,
            turns=100,
            at_least=True,
            turn=240 * MS,
            low=84 * MS,
            high=251 * MS,
            warm_up=2,
            warm_up_time=700 * MS,
            kinds=(SlowIterations(33, 3.0, True, 195 * MS, 6_435 * MS, "train.py:64"),),
            lines=(LineTime("train.py:64", 10_000 * MS, 9_000 * MS, "__next__"),),
            parts=(Part(LINE, place="train.py:70", time=1),),
        ),
    ),
)  # fmt: skip
