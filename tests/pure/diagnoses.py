"""Diagnoses of a few lines, and a timeline to export: what the tests of reports and commands begin with."""

from __future__ import annotations

import numpy as np

from keepbusy.causes.late_ranks import LateRank
from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Cause, Diagnosis, Harmless, Prediction, Site
from keepbusy.timeline.model import FrameKind, Frames, Kind, Lane, LinkKind, Links, Meetings, Spans, Timeline
from keepbusy.timeline.run_facts import RunFacts

MS = 1_000_000


def ms(time: float) -> int:
    return round(time * MS)


def predicted(step: float, low: float, high: float) -> Prediction:
    return Prediction(ms(step), ms(low), ms(high))


COPY = Cause(
    cause="blocking_copy",
    wait=ms(20.1),
    count=1,
    sites=(Site(Where("train.py", 3, "main", exact=True, operator="aten::to", library="torch/nn.py:9"), 1, ms(20.1)),),
    what="One copy of 154 MB a step from pageable memory takes 20.1 ms.",
    fix="pin_and_prefetch",
    advice="Pin the batches and fetch the next one while this one is computed.",
    remedy="for batch in keepbusy.prefetch(loader):",
    api="keepbusy.prefetch",
    predicted=predicted(8.9, 8.4, 10.1),
)
SYNC = Cause(
    cause="host_sync",
    wait=ms(2.0),
    count=12,
    sites=(
        Site(Where("model.py", 44, "forward", operator="aten::item"), 10, ms(1.5)),
        Site(Where("model.py", 60, "forward"), 1, ms(0.4)),
        Site(Where(around="between aten::mm and aten::relu"), 1, ms(0.1)),
        Site(Where("a.py", 1), 1, ms(0.1)),
        Site(Where("b.py", 1), 1, 0),
    ),
    what="The host waits for the GPU 13 times a step.",
    fix="readback",
    advice="Keep the values on the GPU and read them every hundred steps.",
    remedy="log.append(loss.detach())",
    api="",
    predicted=predicted(29.5, 28.0, 30.2),
)
STALLED = Diagnosis(
    plain_step=ms(31.3),
    plain_given=True,
    traced_step=ms(44),
    steps=4,
    ledger={
        "computing": ms(8.2),
        "copying": ms(0.1),
        "host_sync": ms(2.0),
        "blocking_copy": ms(20.1),
        "launch_bound": ms(0.3),
        "unknown": ms(0.6),
    },
    causes=(COPY, SYNC),
    harmless=(
        Harmless("host_sync", Where("train.py", 60, exact=True), 12, "the host would not have been ahead anyway"),
        Harmless("host_sync", Where("train.py", 62, exact=True), 2, "the host would not have been ahead anyway"),
        Harmless("allocator", Where("train.py", 70, exact=True), 1 / 48, "it happens while the GPU is busy"),
    ),
    predicted=predicted(8.6, 8.2, 9.9),
    noise=ms(0.9),
    device="NVIDIA H200",
    sources=("runs/images.trace.json.gz",),
)
HEALTHY = Diagnosis(
    plain_step=ms(31.3),
    plain_given=True,
    traced_step=ms(33),
    steps=4,
    ledger={"computing": ms(30.3), "launch_bound": ms(1.0)},
    causes=(),
    harmless=(),
    predicted=predicted(31.3, 31.3, 31.3),
    noise=ms(0.9),
)
LATE = Diagnosis(
    plain_step=ms(43.0),
    plain_given=True,
    traced_step=ms(60),
    steps=3,
    ledger={"computing": ms(19.0), "collective": ms(3.0), "peer_late": ms(21.0)},
    causes=(
        Cause(
            cause="peer_late",
            wait=ms(21.0),
            count=1,
            sites=(Site(Where("train.py", 15, "main", exact=True), 1, ms(21.0)),),
            what="Three ranks wait for rank 1 in every all-reduce.",
            fix="align_ranks",
            advice="Give every rank the same work.",
            remedy="loader = DataLoader(dataset, num_workers=8)",
            api="torch.utils.data.DataLoader",
            predicted=predicted(22.5, 21.0, 24.0),
        ),
    ),
    harmless=(),
    predicted=predicted(22.5, 21.0, 24.0),
    noise=ms(1.0),
    ranks=(0, 1, 2, 3),
    late=(LateRank(1, ms(20.3), "host_work", Where("train.py", 15, "main", exact=True)),),
    device="NVIDIA H200",
    sources=tuple(f"late.rank{rank}.trace.json.gz" for rank in range(4)),
)


def small_timeline() -> Timeline:
    """A host launches two kernels and reads the second one's result; a step is one kernel."""
    return Timeline(
        lanes=(Lane(0, None, 77, "main"), Lane(0, 0, 7)),
        names=("launch", "gemm", "\x1b[31msync", "aten::item"),
        spans=Spans.of(
            5,
            lane=[0, 1, 0, 1, 0],
            kind=[Kind.LAUNCH, Kind.KERNEL, Kind.LAUNCH, Kind.KERNEL, Kind.SYNC],
            name=[0, 1, 0, 1, 2],
            frame=[-1, -1, -1, -1, 0],
            start=[1000, 6000, 11000, 20000, 21000],
            end=[5000, 20008, 15000, 34000, 35000],
            work=[4000, 14000, 4000, 14000, 1000],
            awaits=[-1, -1, -1, -1, 1],
        ),
        links=Links.of(2, source=[0, 2], target=[1, 3], kind=[LinkKind.LAUNCH] * 2),
        frames=Frames.of(1, lane=[0], kind=[FrameKind.OPERATOR], name=[3], start=[20900], end=[35100]),
        meetings=Meetings.of(0),
        marks=np.array([0, 2, 4]),
        facts=RunFacts(device="NVIDIA H200"),
    )
