"""The virtual device: in-order streams, copy engines, events and syncs on a clock of its own.

Its rules are those of `timeline/replay.py`, applied while the program runs: a launch enqueues a
command and returns; the command starts once its stream is free and whatever it waits for has
ended; a queue that is full holds the next launch up; a sync returns when the device has caught up.
So what it writes down replays to itself; whoever changes a rule here changes it there. Times are
nanoseconds. Streams are known by their number in the timeline's lanes. Every call is safe from
several threads, and none of them sleeps.

The threads and queues that it rules, and the rows that come of it, stand in `lanes.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from threading import get_ident
from typing import Any

from keepbusy.instrument.processes import at_end_of_thread, known_thread
from keepbusy.timeline.model import EVERY_LANE, NONE, WORKERS, Direction, FrameKind, Kind, Lane, LinkKind, Timeline
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.virtual.clock.lanes import (
    BEGINNING,
    MARKS,
    Awaited,
    Graph,
    HostThread,
    Moment,
    Node,
    Rows,
    SharedDevice,
    StreamQueue,
)
from keepbusy.virtual.clock.order import StreamOrder
from keepbusy.virtual.costs.device import Device

_WORK, _LAUNCH, _SYNC, _ALLOCATE = int(Kind.WORK), int(Kind.LAUNCH), int(Kind.SYNC), int(Kind.ALLOCATE)
_KERNEL, _COLLECTIVE, _COPY = int(Kind.KERNEL), int(Kind.COLLECTIVE), int(Kind.COPY)
_OPERATOR = int(FrameKind.OPERATOR)

_STARVATION = 300_000
"""Nanoseconds. Taking a batch that is ready costs less than this."""
_NCCL = "nccl"
"""Begins the names of its kernels, which need multiprocessors; gloo has none."""
_MESSAGES = "SendRecv"
"""In the name of NCCL's kernel that sends and receives, which needs few multiprocessors."""
_FIRST_STREAM = 7
"""CUDA's tools call the default stream 7."""
_PEER_COPY = "Memcpy PtoP (Device -> Device)"


# What CUDA says of a capture, and its numbers for that.
INVALID = 1, "invalid argument"
ILLEGAL = 401, "the operation cannot be performed in the present state"
UNSUPPORTED = 900, "operation not permitted when stream is capturing"
INVALIDATED = 901, "operation failed due to a previous error during capture"
UNJOINED = 904, "capturing stream has unjoined work"
ISOLATION = 905, "dependency created on uncaptured work in another stream"
CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream"


class CaptureError(RuntimeError):
    """One of these."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Clock:
    """One process's view of its devices, and the timeline that it writes of them."""

    def __init__(self, device: Device, rank: int = 0, real: Callable[[], Callable[[], int]] | None = None) -> None:
        """`real`: gives a thread its steady clock, in nanoseconds; None for modelled host time."""
        self.device, self.rank = device, rank
        self.raises: Callable[[str, int], Exception] = CaptureError
        """Makes what is raised where CUDA would return an error of this text and number."""
        self.rows = Rows(device.host.launch, device.queue.gap, device.queue.latency)
        self.lock = threading.RLock()
        self.order = StreamOrder()
        self._real = real

        self.threads: dict[int, HostThread] = {}  # by Python's number; `host` adds those that are missing
        self._ended_threads: dict[int, HostThread] = {}
        self._thread_count = 0
        self._places: dict[tuple[str, ...], int] = {(): 0}
        self._workers: HostThread | None = None  # those of loaders together: what they did are their batches

        self._streams: dict[int, StreamQueue] = {}
        self._default_streams: dict[int, int] = {}
        self._engines: dict[tuple[int, int], tuple[int, int, int]] = {}  # lane, row and end of its last copy
        self._groups: dict[int, int] = {}  # how many ranks are members
        self.wires: dict[int, int] = {}  # of each row of a collective, how long it was on the wire
        self._shared: dict[int, SharedDevice] = {}  # devices on which collectives ran
        self._captures: dict[int, Graph] = {}
        self._dispatch_cost, self._launch_cost = cache(device.host.dispatch), device.host.launch
        self._queue = device.queue
        self._branch_streams: dict[tuple[int, int], int] = {}  # of a stream, on which lanes its graphs' branches run
        self.host()

    # host threads

    def host(self) -> HostThread:
        """The calling thread. One that was never seen begins where the first one is now."""
        return self.threads.get(get_ident()) or self._new_thread()

    def _new_thread(self) -> HostThread:
        number = get_ident()
        with self.lock:
            first = self.first_thread if self.threads else None
            same = self._ended_threads.pop(number, None)
            if same is None:
                known = known_thread()
                name = known.name if known is not None else f"thread {self._thread_count}"
                lane = self.rows.lane(Lane(self.rank, None, self._thread_count, name))
                self._thread_count += 1
                now = first.now if first else 0
                real = self._real() if self._real is not None else None
                self.threads[number] = HostThread(self.rows, lane, now, real)
            else:  # Python gave the number of a thread that has ended: this one goes on in its lane, not at its time
                self.threads[number] = same
                same.chosen_streams.clear()
                if first is not None:
                    self.hand_over(first)
        at_end_of_thread(lambda: self._ended_threads.update({number: self.threads.pop(number)}))
        return self.threads[number]

    def hand_over(self, other: HostThread) -> None:
        """The calling thread goes on once `other` has done what it did so far: a backward pass, begun or ended."""
        host = self.host()
        with self.lock:
            if other is host:
                return
            if other.last != NONE:
                host.releases.append(other.last)
            host.now = max(host.now, other.now)
            host.forget_real_time()

    def pause(self) -> HostThread:
        """The program has called us: see `HostThread.pause`. Its `resume` goes back to the program."""
        host = self.host()
        host.pause()
        return host

    def discount(self, duration: int) -> None:
        """So much of the program's real time was ours, if it is the program that runs now."""
        host = self.threads.get(get_ident())
        if host is not None and not host.pauses:
            host.unwritten_time -= duration

    def knows_caller(self) -> bool:
        return get_ident() in self.threads

    @property
    def first_thread(self) -> HostThread:
        """The one that began the run."""
        return next(iter(self.threads.values()))

    def read(self, place: int) -> int:
        """The program looks at its clock: how far the calling thread is, with all that it did until now."""
        host = self.host()
        with self.lock:
            if not host.depth and host.pauses == 1:
                host.go_to(place)
                host.work_until_look()
            return host.now + host.modelled_time

    def now(self) -> int:
        """How far the calling thread is, without the time that is not written down yet."""
        return self.host().now

    def place(self, *lines: str) -> int:
        """A number for a place in the program: its lines from the outside in.

        Each is written like `train.py(41): main`, as Kineto writes functions, but with the line of the call.
        """
        number = self._places.get(lines)
        if number is None:
            with self.lock:
                number = self._places[lines] = len(self.rows.lines)
                self.rows.lines.append(tuple(self.rows.names[line] for line in lines))
        return number

    # what encloses the program's calls

    def begin(self, name: str, place: int = 0) -> None:
        """An operator of the device begins. Until `end`, real time is ours."""
        host = self.pause()
        with self.lock:
            host.work(self._dispatch(host, name, place))
            host.depth += 1
            host.open(_OPERATOR, name)

    def end(self) -> None:
        """The operator is done, and the program goes on."""
        host = self.threads[get_ident()]
        with self.lock:
            host.close()
            host.depth -= 1
        host.resume()

    def enter(self, kind: FrameKind, name: str, place: int = 0) -> None:
        """Something of the program's own begins, whose time counts: an annotation, a loader, an operator on the host.

        Steps that the program announces, optimizer steps and profiler steps, named as PyTorch names them, are the marks
        of the run's steps.
        """
        host = self.pause()
        with self.lock:
            host.work_where_seen()
            host.go_to(place)
            host.work_until_border()
            host.open(int(kind), name)
            marks = [mark for mark in MARKS if name.startswith(mark)]
            host.marks += marks
            for graph in self._captures.values() if marks else ():
                graph.marks += marks
        host.resume()

    def leave(self) -> None:
        """The innermost frame that `enter` opened ends."""
        host = self.pause()
        with self.lock:
            host.work_until_border()
            host.close()
        host.resume()

    def work(self, duration: int, name: str = "", place: int = 0) -> None:
        """Host work that the clock cannot see, or should not measure: a sleep, an operator of known cost."""
        host = self.host()
        with self.lock:
            if not host.depth:
                host.go_to(place)
            host.work_until_border()
            host.work(duration, name)

    def attribute(self, place: int, until: int) -> bool:
        """At this time, by the real clock, the program was seen at `place`: what it did until then, it did there.

        Whether it did anything that is not written down yet.
        """
        host = self.host()
        with self.lock:
            duration = host.take_time_until(until) if not host.depth else 0
            if duration > 0:
                host.go_to(place)
                host.work(duration)
            return duration > 0

    def spend(self, duration: float) -> None:
        """A little modelled host time that deserves no row of its own: a view, a module called."""
        self.host().modelled_time += round(duration)

    def spend_on_view(self, host: HostThread) -> None:
        """An operator that launches nothing: a view, memory alone. In the backward pass it is a node of its own."""
        host.modelled_time += self.device.host.backward if host.in_backward else self.device.host.view

    def _dispatch(self, host: HostThread, name: str, place: int) -> int:
        """How long the program was at work since it was last seen, up to an operator of the device at its place.

        From the operator before, at least what dispatching this one costs the device's own host, however
        quick this machine is.
        """
        if host.depth:
            return 0
        if host.looks:
            host.work_where_seen()
        if place != host.place:
            host.go_to(place)
        return host.take_dispatch_time((place, name), self._dispatch_cost(name, host.in_backward or host.lane > 0))

    def await_others(self, name: str, last_arrival: Callable[[int], int]) -> None:
        """The host meets other processes, as `last_arrival` says: given when this one came, it returns when all had.

        Each has a clock of its own, which begins with the process.
        """
        host = self.pause()
        host.work_until_border()
        later = last_arrival(host.now) - host.now
        with self.lock:
            host.work(later, name)
        host.resume()

    # batches of a loader's workers: the host waits for them, and they become a lane whose spans are batches

    def await_batch(self) -> None:
        """A loader's workers are asked for a batch. Until it is taken, real time does not count."""
        self.pause().awaits_batch = True

    def take_batch(self, name: str, done: int | None = None) -> None:
        """It has come: what the host waited for it, it waited for them.

        `done`: when they were done with it, by our clock; where nobody knows, it was really waited for.
        """
        host = self.host()
        with self.lock:
            if not host.awaits_batch:
                return
            host.awaits_batch = False
            waited = host.pause_length() if done is None else done - host.now
            if not host.depth and waited >= (_STARVATION if done is None else 1):
                until = host.now + waited
                if self._workers is None:
                    self._workers = HostThread(
                        self.rows, self.rows.lane(Lane(self.rank, None, NONE, WORKERS)), host.now
                    )
                self._workers.work(until - self._workers.now, name)
                host.add(_SYNC, name, until, 0, self._workers.lane)
            elif done is None:
                host.unwritten_time += waited
        host.resume()

    # streams

    @property
    def launched(self) -> bool:
        """Whether a device was ever given anything to do."""
        return any(one.last != NONE for one in self._streams.values())

    def default_stream(self, device: int = 0) -> int:
        """The stream that a device's work goes to unless told otherwise."""
        lane = self._default_streams.get(device)
        return self._default_streams.setdefault(device, self.new_stream(device)) if lane is None else lane

    def new_stream(self, device: int = 0) -> int:
        with self.lock:
            number = sum(one.device == device for one in self._streams.values()) + _FIRST_STREAM
            lane = self.rows.lane(Lane(self.rank, device, number, f"stream {number}"))
            self._streams[lane] = StreamQueue(lane, device, self._queue.pending)
            return lane

    # commands

    def operator(self, name: str, place: int, stream: int, kernels: Sequence[tuple[str, int]]) -> None:
        """`begin`, `launch` and `end` at once, for an operator that only launches kernels.

        Called when its values are computed, while the calling thread is paused. The usual one launches one kernel, and
        nothing but its stream holds that up: it is written down at once.
        """
        host, line, rows = self.threads[get_ident()], self._streams[stream], self.rows
        with self.lock:
            work = self._dispatch(host, name, place)
            if len(kernels) != 1 or host.depth or host.marks or host.releases or line.awaited or self._captures:
                self._operator(host, line, name, work, kernels)
                return
            ((kernel, lasting),) = kernels
            cost, gap, latency = rows.launch
            called = host.now + work
            oldest, ready, free = line.ends[line.place], called + latency, line.tail + gap
            returned, start = (oldest if oldest > called else called) + cost, free if free > ready else ready
            if self._shared:
                lasting = self._lasts(line, kernel, start, lasting)
            launch = rows.operator(
                host.lane, line.lane, rows.names[name], rows.names[kernel], host.frame, host.now, work, returned, start,
                lasting,
            )  # fmt: skip
            host.now, host.last = returned, launch
            line.append(launch, launch + 1, start + lasting)

    def _operator(
        self, host: HostThread, line: StreamQueue, name: str, work: int, kernels: Sequence[tuple[str, int]]
    ) -> None:
        """The same, whatever it launches and waits for."""
        host.work(work)
        outer = host.frame
        host.frame = self.rows.open(host.lane, _OPERATOR, self.rows.names[name], outer, host.now)
        try:
            host.work_modelled_time()
            for kernel, lasting in kernels:
                self._launch(host, line, kernel, lasting)
        finally:  # a capture that has failed refuses them
            self.rows.close(host.frame, host.now)
            host.frame = outer

    def launch(self, stream: int, kernels: Iterable[tuple[str, int]]) -> None:
        """What an operator launches: kernels by name and work, a launch each."""
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            for name, work in kernels:
                self._launch(host, line, name, work)

    def collective(
        self,
        stream: int,
        name: str,
        wire: int,
        size: int,
        group: int,
        members: int,
        last_arrival: Callable[[int], int] | None = None,
    ) -> int:
        """This rank's part of a collective: it ends `wire` after the last rank has arrived.

        `last_arrival` is given when this part could begin and returns when the last of all parts could; it
        may ask the other ranks. `group` is a number for its group of `members` ranks.
        """
        with self.lock:
            host, line, cost = self._arrive(), self._streams[stream], self.device.host.collective
            self._groups[group] = members
            node = Node(stream, _COLLECTIVE, name, wire, size, group, last_arrival)
            if stream in self._captures:
                return self._capture(host, line, cost, node)
            call = self._call(host, line, "cudaLaunchKernelExC", cost)
        return self._run(line, call, node, self._queue.gap)

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
            host, line = self._arrive(), self._streams[stream]
            way = self.device.copies.copy(direction, size, pinned, fresh)
            graph, blocks = self._capture_of(stream), not (non_blocking and way.returns)
            waits_in = "cudaMemcpyAsync" if non_blocking else "cudaStreamSynchronize"
            if blocks:
                self._refuse(waits_in if graph else "cudaStreamSynchronize", graph)
            if graph is not None:
                self._capture(host, line, way.call, Node(stream, _COPY, way.name, way.work, size))
                return
            engine = (line.device, int(direction))  # a device has one for each direction, and all streams share it
            lane, row, end = self._engines.get(engine, (stream, NONE, 0))
            call = self._call(host, line, "cudaMemcpyAsync", way.call)
            if end > line.tail:
                line.wait_for({lane: (row, end)})
            row = self._command(line, call, _COPY, way.name, way.work, size, direction, way.pinned)
            self._engines[engine] = (stream, row, line.tail)
            if blocks:
                self._sync(host, waits_in, stream, line.tail)
                self.order.host_waits(self.order.at(stream))

    def copy_to_peer(self, source: int, target: int, size: int) -> None:
        """From one device to another: in the order of both streams."""
        with self.lock:
            host, line, other = self._arrive(), self._streams[source], self._streams[target]
            work, cost = self.device.wire.time(size), self.device.host.launch
            if source in self._captures:
                self._capture(host, line, 0, Node(source, _COPY, _PEER_COPY, work, size))
                return
            call = self._call(host, line, "cudaMemcpyPeerAsync", cost)
            self.order.stream_waits(source, self.order.at(target))
            self.order.stream_waits(target, self.order.at(source))
            line.wait_for(other.pending())
            row = self._command(line, call, _COPY, _PEER_COPY, work, size, int(Direction.DEVICE_TO_DEVICE))
            other.wait_for({source: (row, line.tail)})

    # events

    def record(self, stream: int) -> Moment:
        """Where the stream is now: what an event holds once it is recorded."""
        with self.lock:
            host, line, graph = self._arrive(), self._streams[stream], self._capture_of(stream)
            host.modelled_time += self.device.host.event
            until = line.until()
            reached = max(until, host.now + host.modelled_time + self._queue.latency)
            captured = graph.reached(stream) if graph else {}
            return Moment(reached, until, line.pending(), graph, captured, self.order.at(stream))

    def wait(self, stream: int, moment: Moment) -> None:
        """What comes next in the stream starts after the moment. A stream that waits for a capture joins it."""
        with self.lock:
            self._arrive().modelled_time += self.device.host.event
            if moment.graph is not None or (stream in self._captures and moment is not BEGINNING):
                self._join(stream, moment)
            else:
                self._streams[stream].wait_for(moment.awaited)
                self.order.stream_waits(stream, moment.order)

    def query(self, moment: Moment) -> bool:
        """Whether the device has passed it."""
        with self.lock:
            host = self._arrive()
            self._touch("cudaEventQuery", moment)
            host.modelled_time += self.device.host.event
            has_passed = moment.time <= host.now + host.modelled_time
            if has_passed:
                self.order.host_waits(moment.order)
            return has_passed

    def passed(self, moment: Moment) -> bool:
        """The same, when nobody asks: it costs no time."""
        return moment.time <= self.host().now

    def idle(self, stream: int) -> bool:
        """Whether everything in the stream is done: `torch.cuda.Stream.query`."""
        with self.lock:
            host = self._arrive()
            self._refuse("cudaStreamQuery", self._captures.get(stream))
            host.modelled_time += self.device.host.event
            is_idle = self._streams[stream].until() <= host.now + host.modelled_time
            if is_idle:
                self.order.host_waits(self.order.at(stream))
            return is_idle

    def elapsed(self, first: Moment, second: Moment) -> int:
        for moment in (first, second):
            self._touch("cudaEventElapsedTime", moment)
        return second.time - first.time

    # syncs, and calls of the driver for memory

    def sync_moment(self, moment: Moment) -> None:
        with self.lock:
            host = self._arrive()
            self._touch("cudaEventSynchronize", moment)
            self._sync(host, "cudaEventSynchronize", NONE, moment.until, moment.awaited)
            self.order.host_waits(moment.order)

    def sync_stream(self, stream: int) -> None:
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            self._refuse("cudaStreamSynchronize", self._captures.get(stream))
            self._sync(host, "cudaStreamSynchronize", stream, line.until(), line.awaited)
            self.order.host_waits(self.order.at(stream))

    def sync_device(self, device: int = 0) -> None:
        with self.lock:
            host = self._arrive()
            self._refuse("cudaDeviceSynchronize", *self._captures.values())
            self._sync(host, "cudaDeviceSynchronize", *self._whole(device))
            for one in self._streams.values():
                if one.device == device:
                    self.order.host_waits(self.order.at(one.lane))

    def allocate(self, name: str, work: int) -> None:
        """A call of the driver for memory: `cudaMalloc`, `cudaHostAlloc`."""
        with self.lock:
            host = self._arrive()
            host.add(_ALLOCATE, name, host.now + work, work)

    def release(self, name: str, work: int, device: int = 0) -> None:
        """A call that gives memory back: it waits for the whole device first, as `cudaFree` does."""
        with self.lock:
            host = self._arrive()
            awaits, until, awaited = self._whole(device)
            if awaits == EVERY_LANE:
                self._sync(host, name, awaits, until, awaited, _ALLOCATE, work)
            else:  # of several devices one: only a sync waits for links
                self._sync(host, name, awaits, until, awaited, work=0)
                host.add(_ALLOCATE, name, host.now + work, work)

    # CUDA graphs: what is launched on a capturing stream is kept, and runs at each replay

    def capture(self, stream: int, mode: str = "global") -> None:
        """From now on what is launched on the stream is kept, not run."""
        with self.lock:
            self._refuse("cudaStreamBeginCapture", self._captures.get(stream), unsafe=False)
            if self._captures:
                raise NotImplementedError("keepbusy's virtual GPU captures one CUDA graph at a time.")
            self._captures[stream] = Graph(stream, mode, get_ident())

    def capturing(self, stream: int) -> bool:
        return stream in self._captures

    def end_capture(self, stream: int) -> Graph:
        """Also of the streams that joined. Raises if the capture is not whole, and it has ended all the same."""
        with self.lock:
            if stream not in self._captures:
                raise self._error(ILLEGAL, "cudaStreamEndCapture")
            graph = self._captures[stream]
            self._captures = {lane: one for lane, one in self._captures.items() if one is not graph}
            if graph.failed or not graph.joined:
                raise self._error(INVALIDATED if graph.failed else UNJOINED)
            return graph

    def instantiate(self, graph: Graph) -> None:
        """Make it ready to be launched."""
        with self.lock:
            costs = self.device.host
            self._arrive().work(costs.graph_made + costs.graph_node_made * len(graph.nodes))

    def replay(self, graph: Graph, stream: int) -> None:
        """One launch, all commands of the graph: each branch in its order, beside the others."""
        with self.lock:
            host, line, costs = self._arrive(), self._streams[stream], self.device.host
            self._refuse("cudaGraphLaunch", self._captures.get(stream), unsafe=False)
            if not graph.nodes:
                return
            host.marks += graph.marks
            call = self._call(host, line, "cudaGraphLaunch", costs.graph + costs.graph_node * len(graph.nodes))
            before, lines = line.pending(), {}
            for number, captured in enumerate(graph.streams()):
                lane = line.lane if number == 0 else self._branch_streams.get((line.lane, number))
                if lane is None:
                    lane = self._branch_streams[line.lane, number] = self.new_stream(line.device)
                lines[captured] = self._streams[lane]
        commands: dict[int, list[tuple[int, int]]] = {one: [] for one in lines}  # rows and ends so far
        for node in graph.nodes:
            branch, earlier = lines[node.stream], commands[node.stream]
            with self.lock:
                branch.wait_for({lines[other].lane: commands[other][count - 1] for other, count in node.after})
                if not earlier and not node.after:
                    branch.wait_for(before)
            row = self._run(branch, call, node, self._queue.graph_gap if earlier else self._queue.gap)
            earlier.append((row, branch.tail))
        with self.lock:
            for one in graph.open_branches():
                line.wait_for({lines[one].lane: commands[one][-1]})

    def _run(self, line: StreamQueue, call: tuple[int, int], node: Node, gap: int) -> int:
        """A command that others may hold up: of a collective, the last of its ranks, asked for without the lock."""
        work, shared = node.work, None
        if node.kind == _COLLECTIVE and node.name.startswith(_NCCL) and _MESSAGES not in node.name:
            shared = self._shared.setdefault(line.device, SharedDevice(self.device.slower_together))
        if node.last_arrival is not None:
            with self.lock:
                start = self._earliest_start(line, call, gap)
            work += max(0, node.last_arrival(start + (shared.owed() if shared else 0)) - start)
        with self.lock:
            row = self._command(line, call, node.kind, node.name, work, node.size, group=node.group, gap=gap)
            if node.kind == _COLLECTIVE:
                self.wires[row] = node.work
            if shared:
                shared.hold(line.tail - node.work, line.tail)
            return row

    # the timeline

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far. `facts` join those that the clock knows: `source`, the script, is one to give."""
        with self.lock:
            hosts = [*self.threads.values(), *self._ended_threads.values()]
            for host in hosts:
                host.work_modelled_time()
            known = {
                "device": f"virtual {self.device.name}",
                "pinned_bandwidth": float(self.device.copies.pinned),
                "virtual": True,
                "pending_limit": self._queue.pending,
                "groups": dict(sorted(self._groups.items())),
            }
            return self.rows.timeline({host.lane: host.now for host in hosts}, RunFacts(**{**known, **facts}))

    # the rules of the queue, with the lock held: enqueue, start, end, wait

    def _arrive(self) -> HostThread:
        """The calling thread, with its own time written down."""
        host = self.host()
        host.work_until_call()
        return host

    def _launch(self, host: HostThread, line: StreamQueue, name: str, work: int) -> None:
        """A kernel that runs for `work` once nothing holds it up."""
        if line.lane in self._captures:
            self._capture(host, line, self._launch_cost, Node(line.lane, _KERNEL, name, work))
        else:
            self._command(line, self._call(host, line, "cudaLaunchKernel", self._launch_cost), _KERNEL, name, work)

    def _call(self, host: HostThread, line: StreamQueue, name: str, cost: int) -> tuple[int, int]:
        """A launch: its row, and when it began. A full queue holds it up."""
        start, oldest = host.now, line.ends[line.place]
        return host.add(_LAUNCH, name, (oldest if oldest > start else start) + cost, cost), start

    def _earliest_start(self, line: StreamQueue, call: tuple[int, int], gap: int) -> int:
        """When a command launched so may start: the stream is free, and what it waits for has ended."""
        queue = self._queue
        start, free = call[1] + queue.latency, line.tail + gap
        if free > start:
            start = free
        for _, end in line.awaited.values():
            start = max(start, end + queue.gap)
        return start

    def _lasts(self, line: StreamQueue, name: str, start: int, work: int) -> int:
        return self._shared[line.device].lasts(name, start, work) if line.device in self._shared else work

    def _command(
        self,
        line: StreamQueue,
        call: tuple[int, int],
        kind: int,
        name: str,
        work: int,
        size: int = 0,
        direction: int = 0,
        pinned: int = NONE,
        group: int = NONE,
        gap: int | None = None,
    ) -> int:
        """It starts as early as it may; returns its row."""
        rows, queue, lane, launch = self.rows, self._queue, line.lane, call[0]
        lag, text = queue.gap if gap is None else gap, rows.names[name]
        start = self._earliest_start(line, call, lag)
        if kind == _KERNEL and self._shared:
            work = self._lasts(line, name, start, work)
        end = start + work
        row = rows.add(
            lane, kind, text, NONE, start, end, work, lag, NONE, group, size, direction, pinned, launch, queue.latency
        )  # fmt: skip
        if line.awaited:
            for source, _ in line.awaited.values():
                rows.link(source, row, LinkKind.ORDER, queue.gap)
            line.awaited.clear()
        line.append(launch, row, end)
        return row

    def _sync(
        self,
        host: HostThread,
        name: str,
        awaits: int,
        until: int,
        awaited: Awaited | None = None,
        kind: int = _SYNC,
        work: int | None = None,
    ) -> None:
        """The host waits: for a lane, until a time, and by links for rows of others."""
        work = self.device.host.sync if work is None else work
        if host.releases:
            host.add(_WORK, "", host.now, 0)  # a sync begins at once, whatever it waits for
        row = host.add(kind, name, max(host.now, until) + work, work, awaits)
        for source, _ in (awaited or {}).values():
            self.rows.link(source, row, LinkKind.ORDER)

    def _whole(self, device: int) -> tuple[int, int, Awaited]:
        """All lanes of a device: whom a sync awaits, until when, and which rows by links."""
        streams = [one for one in self._streams.values() if one.device == device]
        until = max((one.until() for one in streams), default=0)
        together = StreamQueue(NONE, device, 0)
        every = all(one.device == device for one in self._streams.values())
        for one in streams:
            together.wait_for(one.awaited if every else one.pending())
        return EVERY_LANE if every else NONE, until, together.awaited

    # the rules of captures, with the lock held

    def _capture_of(self, stream: int) -> Graph | None:
        """The capture that a stream takes part in, if any; after an error it takes nothing more."""
        graph = self._captures.get(stream)
        if graph is not None and graph.failed:
            raise self._error(INVALIDATED)
        return graph

    def _capture(self, host: HostThread, line: StreamQueue, cost: int, node: Node) -> int:
        graph = self._capture_of(line.lane)
        assert graph is not None
        graph.add(node)
        host.work(cost)
        return NONE

    def _refuse(self, call: str, *graphs: Graph | None, unsafe: bool = True) -> None:
        """Refuse a call that touches these captures, or that a capture forbids anywhere: then it is `unsafe`."""
        if not self._captures:
            return
        broken = {one for one in graphs if one is not None}
        if unsafe:
            broken |= {one for one in self._captures.values() if one.forbids(get_ident())}
        for one in broken:
            one.failed = True
        if broken:
            raise self._error(UNSUPPORTED, call)

    def _touch(self, call: str, moment: Moment, unsafe: bool = True) -> None:
        """An event of a capture may not be asked for, and after the capture it may not be used at all."""
        if moment.graph is not None and moment.graph not in self._captures.values():
            raise self._error(INVALID, call)
        if unsafe and moment.graph is not None:
            moment.graph.failed = True
            raise self._error(CAPTURED_EVENT, call)
        if unsafe:
            self._refuse(call)

    def _join(self, stream: int, moment: Moment) -> None:
        """The stream takes part in the capture that the moment belongs to; nothing else may be waited for in one."""
        self._touch("cudaStreamWaitEvent", moment, unsafe=False)
        joined = self._captures.get(stream)
        if moment.graph is None or joined not in (None, moment.graph):
            if joined is not None:
                joined.failed = True
            raise self._error(ISOLATION)
        self._captures[stream] = moment.graph
        moment.graph.join(stream, moment.reached)

    def _error(self, what: tuple[int, str], call: str = "") -> Exception:
        code, text = what
        return self.raises(f"CUDA error: {text}" + (f"\nThe call was {call}." if call else ""), code)
