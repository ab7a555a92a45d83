"""The virtual device: in-order streams, copy engines, events and syncs on a clock of its own.

Its rules are those of `timeline/replay.py`, applied while the program runs: a launch enqueues a
command and returns; the command starts once its stream is free and whatever it waits for has
ended; a queue that is full holds the next launch up; a sync returns when the device has caught up.
So what it writes down replays to itself. Times are nanoseconds. Streams are known by their number
in the timeline's lanes. Every call is safe from several threads, and none of them sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from keepbusy.timeline.model import NONE, Direction, Kind, Timeline
from keepbusy.virtual.captures import Captures
from keepbusy.virtual.graphs import CaptureError, Graph
from keepbusy.virtual.streams import BEGINNING, Moment

__all__ = ["BEGINNING", "CaptureError", "Clock", "Graph", "Moment"]

_ALLOCATE = int(Kind.ALLOCATE)
_KERNEL, _COLLECTIVE, _FILL, _COPY = int(Kind.KERNEL), int(Kind.COLLECTIVE), int(Kind.FILL), int(Kind.COPY)
_DEVICE = int(Direction.DEVICE_TO_DEVICE)
_PEERS = "Memcpy PtoP (Device -> Device)"


class Clock(Captures):
    """One process's view of its devices. What encloses the calls (`begin`, `enter`, …) is in `Program`."""

    # commands

    def launch(self, stream: int, name: str, work: int, size: int = 0) -> int:
        """A kernel that runs for `work` once nothing holds it up. Returns its row, or NONE during a capture."""
        with self.lock:
            return self._enqueue(self._arrive(), stream, _KERNEL, name, work, size)

    def launch_all(self, stream: int, kernels: Iterable[tuple[str, int]]) -> None:
        """What an operator launches: kernels by name and work, a launch each."""
        with self.lock:
            host = self._arrive()
            for name, work in kernels:
                self._enqueue(host, stream, _KERNEL, name, work)

    def fill(self, stream: int, size: int, work: int) -> int:
        with self.lock:
            return self._enqueue(self._arrive(), stream, _FILL, "Memset (Device)", work, size, "cudaMemsetAsync")

    def collective(
        self,
        stream: int,
        name: str,
        wire: int,
        size: int,
        group: int,
        members: int,
        meet: Callable[[int], int] | None = None,
    ) -> int:
        """This rank's part of a collective: it ends `wire` after the last rank has arrived.

        `meet` is given when this part could begin and returns when the last of all parts could; it
        may ask the other ranks. `group` is a number for its group of `members` ranks.
        """
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            self.groups[group] = members
            if stream in self._captures:
                self._captured(stream).add(stream, _COLLECTIVE, name, wire, size, group, meet)
                self._work(host, self.device.host.collective, "")
                return NONE
            call = self._call(host, line, "cudaLaunchKernelExC", self.device.host.collective)
            start = self._ready(line, call)
        last = start if meet is None else max(start, meet(start))
        with self.lock:
            return self._command(line, call, _COLLECTIVE, name, start, last + wire - start, size, group=group)

    # copies

    def copy(
        self,
        stream: int,
        direction: Direction,
        size: int,
        pinned: bool = False,
        non_blocking: bool = False,
        fresh: int = 0,
    ) -> None:
        """Bytes between host and device; `pinned` and `non_blocking` as the program asked for them.

        Without `non_blocking` the host waits for the stream; from or to pageable memory it waits
        anyway, unless the driver can stage the bytes. `fresh`: so many of them go to memory of the host
        that was never touched.
        """
        with self.lock:
            host, way = self._arrive(), self.device.copies.way(direction, size, pinned, fresh)
            if stream in self._captures:
                self._capture_copy(host, stream, way, size, non_blocking)
                return
            if not (non_blocking and way.returns):
                self._refuse("cudaStreamSynchronize")
            line = self._streams[stream]
            call = self._call(host, line, "cudaMemcpyAsync", way.call)
            self._await_engine(line, direction)
            row = self._command(
                line, call, _COPY, way.name, self._ready(line, call), way.work, size, direction, way.pinned
            )
            self._engines[line.device, direction] = (line.lane, row, line.tail)
            if not (non_blocking and way.returns):
                self._sync(
                    host, "cudaMemcpyAsync" if non_blocking else "cudaStreamSynchronize", line.lane, line.tail, ()
                )

    def copy_to_peer(self, source: int, target: int, size: int, non_blocking: bool = True) -> None:
        """From one device to another: in the order of both streams."""
        with self.lock:
            host, line, other = self._arrive(), self._streams[source], self._streams[target]
            if source in self._captures:
                self._captured(source).add(source, _COPY, _PEERS, self.device.wire.time(size), size)
                return
            call = self._call(host, line, "cudaMemcpyPeerAsync", self.device.host.launch)
            line.awaited += [(row, other.until()) for row in other.before()]
            work = self.device.wire.time(size)
            self._command(line, call, _COPY, _PEERS, self._ready(line, call), work, size, _DEVICE)
            other.awaited.append((line.last, line.tail))
            if not non_blocking:
                self._sync(host, "cudaStreamSynchronize", line.lane, line.tail, ())

    # events and waits

    def record(self, stream: int) -> Moment:
        """Where the stream is now: what an event holds once it is recorded."""
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            host.passing.spent += self.device.host.event
            until = line.until()
            reached = max(until, host.now + host.passing.spent + self.device.queue.latency)
            graph = self._captured(stream) if stream in self._captures else None
            return Moment(reached, until, line.before(), graph, graph.reached(stream) if graph else {})

    def wait(self, stream: int, moment: Moment) -> None:
        """What comes next in the stream starts after the moment. A stream that waits for a capture joins it."""
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            host.passing.spent += self.device.host.event
            if moment.graph is not None or (stream in self._captures and moment is not BEGINNING):
                self._join(stream, moment)
                return
            own = line.last
            line.awaited += [(row, moment.until) for row in moment.rows if row != own]

    def query(self, moment: Moment) -> bool:
        """Whether the device has passed it."""
        with self.lock:
            host = self._arrive()
            self._touch("cudaEventQuery", moment)
            host.passing.spent += self.device.host.event
            return moment.time <= host.now + host.passing.spent

    def passed(self, moment: Moment) -> bool:
        """The same, when nobody asks: it costs no time."""
        return moment.time <= self.host().now

    def idle(self, stream: int) -> bool:
        """Whether everything in the stream is done: `Stream.query`."""
        with self.lock:
            host = self._arrive()
            self._refuse("cudaStreamQuery", self._captures.get(stream))
            host.passing.spent += self.device.host.event
            return self._streams[stream].until() <= host.now + host.passing.spent

    def elapsed(self, first: Moment, second: Moment) -> int:
        for moment in (first, second):
            self._touch("cudaEventElapsedTime", moment)
        return second.time - first.time

    # syncs: the host waits for the device

    def sync_moment(self, moment: Moment, name: str = "cudaEventSynchronize") -> None:
        with self.lock:
            host = self._arrive()
            self._touch(name, moment)
            self._sync(host, name, NONE, moment.until, moment.rows)

    def sync_stream(self, stream: int, name: str = "cudaStreamSynchronize") -> None:
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            self._refuse(name, self._captures.get(stream))
            self._sync(host, name, line.lane, line.until(), [row for row, _ in line.awaited])

    def sync_device(self, device: int = 0, name: str = "cudaDeviceSynchronize") -> None:
        with self.lock:
            host = self._arrive()
            self._refuse(name, *self._captures.values())
            awaits, until, rows = self._whole(device)
            self._sync(host, name, awaits, until, rows)

    def allocate(self, name: str, work: int) -> None:
        """A call of the driver for memory: `cudaMalloc`, `cudaHostAlloc`."""
        with self.lock:
            host = self._arrive()
            self._host_row(host, _ALLOCATE, name, host.now, host.now + work, work)

    def release(self, name: str, work: int, device: int = 0) -> None:
        """A call that gives memory back: it waits for the whole device first, as `cudaFree` does."""
        with self.lock:
            host = self._arrive()
            awaits, until, rows = self._whole(device)
            if awaits == NONE:  # of several devices one: only a sync waits for links
                self._sync(host, name, NONE, until, rows, work=0)
                self._host_row(host, _ALLOCATE, name, host.now, host.now + work, work)
            else:
                self._sync(host, name, awaits, until, rows, _ALLOCATE, work)

    # the timeline

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far. `facts` join those that the clock knows: `source`, the script, is one to give."""
        with self.lock:
            hosts = [*self._hosts.values(), *self._ended.values()]
            for host in hosts:
                self._work(host, host.passing.spent, "")
                host.passing.spent = 0
            self.rows.marks = self.steps()
            known = {
                "device": self.device.name,
                "stacks": True,
                "virtual": True,
                "pending_limit": self.device.queue.pending,
                "groups": {str(group): members for group, members in sorted(self.groups.items())},
            }
            return self.rows.timeline({host.lane: host.now for host in hosts}, {**known, **facts})
