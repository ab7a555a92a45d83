"""PyTorch's profiler JSON -> `Trace`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from keepbusy.record.batches import Batches
from keepbusy.record.columns import Collector
from keepbusy.record.events import Trace
from keepbusy.record.side_by_side import answer_parent, read_all
from keepbusy.record.unzip import OnProgress, blocks
from keepbusy.timeline.errors import BadInput


def read_traces(paths: Sequence[str | Path], on_progress: OnProgress | None = None) -> list[Trace]:
    """All these files in their order, on all cores where that pays."""
    names = [os.fspath(path) for path in paths]
    if len(names) == 1:
        return [read_trace(names[0], on_progress)]
    traces = read_all(read_trace, f"from {__name__} import serve; serve()", names, on_progress)
    return [replace(trace, events=trace.events.change()) for trace in traces]  # a copy by pickle is writable


def read_trace(path: str | Path, on_progress: OnProgress | None = None) -> Trace:
    """One file, .json or .json.gz, of PyTorch 2.4 to 2.13; raises `BadInput` for anything else."""
    path = os.fspath(path)
    collector = Collector()
    batches = Batches(path, blocks(path, on_progress))
    for rows in batches:
        collector.add(rows)
    facts = batches.facts()
    skipped = batches.decoder.bad + collector.skipped
    _refuse_bad(path, batches, skipped)
    if not len(collector):
        raise BadInput(
            f"{path} holds no complete events (`ph: X`) of PyTorch's kinds; record at least two steps and export again."
        )
    return Trace(
        path=path,
        events=collector.events(),
        names=tuple(collector.names),
        threads=collector.threads.table(),
        collectives=tuple(collector.collectives),
        facts=facts,
        skipped=skipped,
    )


def serve() -> None:
    """The other end of `read_traces`, in a process of its own."""
    answer_parent(read_trace)


def _refuse_bad(path: str, batches: Batches, skipped: int) -> None:
    decoder = batches.decoder
    if 2 * skipped > decoder.bad + decoder.read:
        raise BadInput(
            f"{path} has {skipped} events of {decoder.bad + decoder.read} that cannot be read "
            f"({decoder.fault or 'no sound times'}); give a trace as PyTorch's profiler exported it."
        )
