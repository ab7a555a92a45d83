"""A profiler trace as columns: what PyTorch wrote, in Kineto's own terms, before anyone interprets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from keepbusy.timeline.model import NONE, Ints
from keepbusy.timeline.table import Table, column


class Category(IntEnum):
    """Kineto's `cat`, of the complete events (`ph: X`) that say something about who waits for whom."""

    KERNEL = 0  # kernel
    COPY = 1  # gpu_memcpy
    FILL = 2  # gpu_memset
    RUNTIME = 3  # cuda_runtime
    DRIVER = 4  # cuda_driver
    OPERATOR = 5  # cpu_op
    PYTHON = 6  # python_function
    ANNOTATION = 7  # user_annotation
    OVERHEAD = 8  # overhead
    SYNC = 9  # cuda_sync, of traces with enable_cuda_sync_events
    RECORD = 10  # cuda_event, beside them: an event recorded on a stream, where Kineto is new enough
    LINE = 11  # not Kineto's: a line of the program, from our own window


@dataclass(frozen=True, eq=False)
class Events(Table):
    """One complete event a row, in the order of the file. Times are nanoseconds; what an event does not say is NONE."""

    category: Ints = column(np.int8)
    name: Ints = column(np.int32)
    thread: Ints = column(np.int32)  # an index into Trace.threads
    start: Ints = column(np.int64)
    end: Ints = column(np.int64)
    correlation: Ints = column(np.int64, NONE)
    device: Ints = column(np.int32, NONE)
    stream: Ints = column(np.int64, NONE)
    size: Ints = column(np.int64, NONE)  # args.bytes
    sequence: Ints = column(np.int64, NONE)  # args."Sequence number"; of a collective its "Seq"
    collective: Ints = column(np.int32, NONE)  # an index into Trace.collectives
    graph: Ints = column(np.int64, NONE)  # args."graph id", of kernels that a graph launched
    awaited_stream: Ints = column(np.int64, NONE)  # args.wait_on_stream
    awaited_record: Ints = column(np.int64, NONE)  # args.wait_on_cuda_event_record_corr_id
    event: Ints = column(np.int64, NONE)  # args.wait_on_cuda_event_id; of a RECORD, event_id


class Thread(NamedTuple):
    """Where an event stood: a host thread, or a stream of a device."""

    process: str
    number: str
    name: str


class Collective(NamedTuple):
    """What an NCCL kernel says of itself."""

    name: str
    elements_in: int
    elements_out: int
    dtype: str
    group: str  # "Process Group Name"
    group_size: int
    ranks: tuple[int, ...]  # of the group, empty where the trace abbreviates them
    peer: int = NONE  # of a send or recv: the other rank


@dataclass(frozen=True, eq=False)
class Trace:
    """One file."""

    path: str
    events: Events
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    collectives: tuple[Collective, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Everything that stands beside `traceEvents`: schemaVersion, deviceProperties, distributedInfo, with_stack, …"""
    skipped: int = 0
    """Events that could not be read."""
