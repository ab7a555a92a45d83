"""The virtual device: in-order streams, copy engines, events and syncs on a clock of its own.

Its rules are those of `timeline/replay.py`, applied while the program runs: a launch enqueues a command and returns;
the command starts once its stream is free and whatever it waits for has ended; a full queue delays the next launch; a
sync returns when the device has caught up. So the timeline replays to itself; a rule that changes here must change
there, too. Times are nanoseconds. A stream's number is that of its lane in the timeline. Every call is safe from
several threads, and none sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

from keepbusy.timeline.model import EVERY_LANE, NONE, Direction, FrameKind, Kind, LinkKind, Timeline
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.virtual.clock.captures import BEGINNING, Awaited, Graph, Moment, Node
from keepbusy.virtual.clock.device_queues import DeviceQueues, Launch, StreamQueue
from keepbusy.virtual.clock.host_clock import HostClock
from keepbusy.virtual.clock.host_thread import HostThread
from keepbusy.virtual.clock.order import StreamOrder
from keepbusy.virtual.costs.device import Device

_WORK, _LAUNCH, _SYNC, _ALLOCATE = int(Kind.WORK), int(Kind.LAUNCH), int(Kind.SYNC), int(Kind.ALLOCATE)
_KERNEL, _COLLECTIVE, _COPY = int(Kind.KERNEL), int(Kind.COLLECTIVE), int(Kind.COPY)
_OPERATOR = int(FrameKind.OPERATOR)
_PEER_COPY = "Memcpy PtoP (Device -> Device)"


class Clock(HostClock):
    """The devices of one process, with a method for each call of CUDA, and the timeline of all calls."""

    def __init__(self, device: Device, rank: int = 0, real: Callable[[], Callable[[], int]] | None = None) -> None:
        super().__init__(device, rank, real)
        self.queues = DeviceQueues(device, rank, self.rows)
        self.order = StreamOrder()
        self._limits = device.queue
        self._groups: dict[int, int] = {}  # number of ranks by group

    @property
    def launched(self) -> bool:
        """Whether anything was launched on a device."""
        return any(queue.last != NONE for queue in self.queues.streams.values())

    def default_stream(self, device: int = 0) -> int:
        """The stream of work that names no other."""
        with self.lock:
            return self.queues.default_stream(device)

    def new_stream(self, device: int = 0) -> int:
        with self.lock:
            return self.queues.add_stream(device)

    # commands

    def operator(self, name: str, place: int, stream: int, kernels: Sequence[tuple[str, int]]) -> None:
        """`begin`, `launch` and `end` at once, for an operator that only launches kernels, while the thread is paused.

        The usual operator launches one kernel that only its stream delays; for it there is a shorter path.
        """
        host, queue, rows = self.threads[get_ident()], self.queues.streams[stream], self.rows
        with self.lock:
            work = self._dispatch(host, name, place)
            if len(kernels) == 1 and not (host.depth or host.marks or host.releases or queue.awaited or self.captures):
                ((kernel, lasting),) = kernels
                cost, gap, latency = rows.launch
                called = host.now + work
                oldest, ready, free = queue.ends[queue.place], called + latency, queue.tail + gap
                returned, start = (oldest if oldest > called else called) + cost, free if free > ready else ready
                lasting = self.queues.kernel_duration(queue, kernel, start, lasting)
                launch = rows.operator(
                    host.lane, queue.lane, rows.names[name], rows.names[kernel], host.frame, host.now, work, returned,
                    start, lasting,
                )  # fmt: skip
                host.now, host.last = returned, launch
                queue.append(launch, launch + 1, start + lasting)
                return
            host.work(work)
            outer = host.frame
            host.frame = rows.open(host.lane, _OPERATOR, rows.names[name], outer, host.now)
            try:
                host.work_modelled_time()
                for kernel, lasting in kernels:
                    self._launch(host, queue, kernel, lasting)
            finally:  # a failed capture refuses kernels
                rows.close(host.frame, host.now)
                host.frame = outer

    def launch(self, stream: int, kernels: Iterable[tuple[str, int]]) -> None:
        """The kernels of an operator, by name and work, with a launch each."""
        with self.lock:
            host, queue = self._arrive(), self.queues.streams[stream]
            for name, work in kernels:
                self._launch(host, queue, name, work)

    def collective(
        self, stream: int, name: str, wire: int, size: int, group: int, members: int,
        last_arrival: Callable[[int], int] | None = None,
    ) -> int:  # fmt: skip
        """This rank's part of a collective: it ends `wire` after the last rank has arrived.

        `last_arrival`: given when this rank's part could begin, returns when that of the last rank could.
        """
        with self.lock:
            host, queue, cost = self._arrive(), self.queues.streams[stream], self.device.host.collective
            self._groups[group] = members
            node = Node(stream, _COLLECTIVE, name, wire, size, group, last_arrival)
            if stream in self.captures:
                self._capture(host, cost, node)
                return NONE
            launch = self._call(host, queue, "cudaLaunchKernelExC", cost)
        return self._run(queue, launch, node, self._limits.gap)

    def copy(
        self, stream: int, direction: Direction, size: int, pinned: bool = False, non_blocking: bool = False,
        fresh: int = 0,
    ) -> None:  # fmt: skip
        """A copy between host and device. The host waits for it, unless it is `non_blocking` and either pinned or small
        enough for the driver to stage. `fresh`: bytes that go to host memory that was never touched."""
        with self.lock:
            host, queue = self._arrive(), self.queues.streams[stream]
            copy = self.device.copies.copy(direction, size, pinned, fresh)
            node = Node(stream, _COPY, copy.name, copy.work, size)
            graph, blocks = self.captures.of(stream), not (non_blocking and copy.returns)
            waits_in = "cudaMemcpyAsync" if non_blocking else "cudaStreamSynchronize"
            if blocks:
                self.captures.refuse(waits_in if graph else "cudaStreamSynchronize", graph)
            if graph is not None:
                self._capture(host, copy.call, node)
                return
            launch = self._call(host, queue, "cudaMemcpyAsync", copy.call)
            self.queues.copy(queue, launch, node, direction, copy.pinned)
            if blocks:
                self._sync(host, waits_in, stream, queue.tail)
                self.order.host_waits(self.order.reached(stream))

    def copy_to_peer(self, source: int, target: int, size: int) -> None:
        """A copy from one device to another, in the order of both streams."""
        with self.lock:
            host, queue, other = self._arrive(), self.queues.streams[source], self.queues.streams[target]
            node = Node(source, _COPY, _PEER_COPY, self.device.wire.time(size), size)
            if source in self.captures:
                self._capture(host, 0, node)
                return
            launch = self._call(host, queue, "cudaMemcpyPeerAsync", self.device.host.launch)
            self.order.stream_waits(source, self.order.reached(target))
            self.order.stream_waits(target, self.order.reached(source))
            queue.wait_for(other.pending())
            row = self.queues.add(queue, launch, node._replace(direction=int(Direction.DEVICE_TO_DEVICE)))
            other.wait_for({source: (row, queue.tail)})

    # events

    def record(self, stream: int) -> Moment:
        """The stream's present position, which a recorded event holds."""
        with self.lock:
            host, queue, graph = self._arrive(), self.queues.streams[stream], self.captures.of(stream)
            host.modelled_time += self.device.host.event
            until = queue.until()
            passed = max(until, host.now + host.modelled_time + self._limits.latency)
            captured = graph.reached(stream) if graph else {}
            return Moment(passed, until, queue.pending(), graph, captured, self.order.reached(stream))

    def wait(self, stream: int, moment: Moment) -> None:
        """The stream's next command starts after the moment. A stream that waits for a capture joins it."""
        with self.lock:
            self._arrive().modelled_time += self.device.host.event
            if moment.graph is not None or (stream in self.captures and moment is not BEGINNING):
                self.captures.join(stream, moment)
            else:
                self.queues.streams[stream].wait_for(moment.awaited)
                self.order.stream_waits(stream, moment.order)

    def query(self, moment: Moment) -> bool:
        """Whether the device has passed the moment."""
        with self.lock:
            host = self._arrive()
            self.captures.use_event("cudaEventQuery", moment)
            host.modelled_time += self.device.host.event
            has_passed = moment.time <= host.now + host.modelled_time
            if has_passed:
                self.order.host_waits(moment.order)
            return has_passed

    def passed(self, moment: Moment) -> bool:
        """The same without a call of the program's, so it takes no time."""
        return moment.time <= self.host().now

    def idle(self, stream: int) -> bool:
        """Whether everything in the stream is done: `torch.cuda.Stream.query`."""
        with self.lock:
            host = self._arrive()
            self.captures.refuse("cudaStreamQuery", self.captures.get(stream))
            host.modelled_time += self.device.host.event
            is_idle = self.queues.streams[stream].until() <= host.now + host.modelled_time
            if is_idle:
                self.order.host_waits(self.order.reached(stream))
            return is_idle

    def elapsed(self, first: Moment, second: Moment) -> int:
        for moment in (first, second):
            self.captures.use_event("cudaEventElapsedTime", moment)
        return second.time - first.time

    # syncs, and calls of the driver for memory

    def sync_moment(self, moment: Moment) -> None:
        with self.lock:
            host = self._arrive()
            self.captures.use_event("cudaEventSynchronize", moment)
            self._sync(host, "cudaEventSynchronize", NONE, moment.until, moment.awaited)
            self.order.host_waits(moment.order)

    def sync_stream(self, stream: int) -> None:
        with self.lock:
            host, queue = self._arrive(), self.queues.streams[stream]
            self.captures.refuse("cudaStreamSynchronize", self.captures.get(stream))
            self._sync(host, "cudaStreamSynchronize", stream, queue.until(), queue.awaited)
            self.order.host_waits(self.order.reached(stream))

    def sync_device(self, device: int = 0) -> None:
        with self.lock:
            host = self._arrive()
            self.captures.refuse("cudaDeviceSynchronize", *self.captures.values())
            self._sync(host, "cudaDeviceSynchronize", *self.queues.sync_targets(device))
            for queue in self.queues.streams.values():
                if queue.device == device:
                    self.order.host_waits(self.order.reached(queue.lane))

    def allocate(self, name: str, work: int) -> None:
        """A call of the driver for memory: `cudaMalloc`, `cudaHostAlloc`."""
        with self.lock:
            host = self._arrive()
            host.add(_ALLOCATE, name, host.now + work, work)

    def release(self, name: str, work: int, device: int = 0) -> None:
        """A call that gives memory back: it waits for the whole device first, as `cudaFree` does."""
        with self.lock:
            host = self._arrive()
            awaits, until, awaited = self.queues.sync_targets(device)
            if awaits == EVERY_LANE:
                self._sync(host, name, awaits, until, awaited, _ALLOCATE, work)
            else:  # one of several devices: only a sync can wait by links
                self._sync(host, name, awaits, until, awaited, work=0)
                host.add(_ALLOCATE, name, host.now + work, work)

    # CUDA graphs: launches on a capturing stream are recorded, and run at each replay

    def capture(self, stream: int, mode: str = "global") -> None:
        """From now on launches on the stream are recorded and not run."""
        with self.lock:
            self.captures.begin(stream, mode)

    def capturing(self, stream: int) -> bool:
        return stream in self.captures

    def end_capture(self, stream: int) -> Graph:
        with self.lock:
            return self.captures.end(stream)

    def instantiate(self, graph: Graph) -> None:
        """Make it ready to be launched."""
        with self.lock:
            costs = self.device.host
            self._arrive().work(costs.graph_made + costs.graph_node_made * len(graph.nodes))

    def replay(self, graph: Graph, stream: int) -> None:
        """One launch of all commands of the graph; its branches run in parallel."""
        with self.lock:
            host, queue, costs = self._arrive(), self.queues.streams[stream], self.device.host
            self.captures.refuse("cudaGraphLaunch", self.captures.get(stream), unsafe=False)
            if not graph.nodes:
                return
            host.marks += graph.marks
            launch = self._call(host, queue, "cudaGraphLaunch", costs.graph + costs.graph_node * len(graph.nodes))
            before = queue.pending()
            branches = {lane: self.queues.branch(queue, number) for number, lane in enumerate(graph.streams())}
        commands: dict[int, list[tuple[int, int]]] = {lane: [] for lane in branches}  # rows and ends so far
        for node in graph.nodes:
            branch, earlier = branches[node.stream], commands[node.stream]
            with self.lock:
                branch.wait_for({branches[lane].lane: commands[lane][count - 1] for lane, count in node.after})
                if not earlier and not node.after:
                    branch.wait_for(before)
            row = self._run(branch, launch, node, self._limits.graph_gap if earlier else self._limits.gap)
            earlier.append((row, branch.tail))
        with self.lock:
            for lane in graph.open_branches():
                queue.wait_for({branches[lane].lane: commands[lane][-1]})

    # the timeline

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far. `facts`, such as the script as `source`, are added to those that the clock knows."""
        with self.lock:
            hosts = [*self.threads.values(), *self._ended_threads.values()]
            for host in hosts:
                host.work_modelled_time()
            own_facts = {
                "device": f"virtual {self.device.name}",
                "pinned_bandwidth": float(self.device.copies.pinned),
                "virtual": True,
                "pending_limit": self._limits.pending,
                "groups": dict(sorted(self._groups.items())),
            }
            return self.rows.timeline({host.lane: host.now for host in hosts}, RunFacts(**{**own_facts, **facts}))

    # parts of several calls, with the lock held

    def _arrive(self) -> HostThread:
        """The calling thread, with its time up to now written down; within an operator only modelled time counts."""
        host = self.host()
        if host.depth:
            host.work_modelled_time()
        else:
            host.work_until_border()
        return host

    def _call(self, host: HostThread, queue: StreamQueue, name: str, cost: int) -> Launch:
        """A launch, which waits while the queue is full."""
        start = host.now
        return Launch(host.add(_LAUNCH, name, max(start, queue.ends[queue.place]) + cost, cost), start)

    def _launch(self, host: HostThread, queue: StreamQueue, name: str, work: int) -> None:
        """A kernel that runs for `work` once it starts."""
        node, cost = Node(queue.lane, _KERNEL, name, work), self.device.host.launch
        if queue.lane in self.captures:
            self._capture(host, cost, node)
        else:
            self.queues.add(queue, self._call(host, queue, "cudaLaunchKernel", cost), node)

    def _capture(self, host: HostThread, cost: int, node: Node) -> None:
        graph = self.captures.of(node.stream)
        assert graph is not None
        graph.add(node)
        host.work(cost)

    def _run(self, queue: StreamQueue, launch: Launch, node: Node, gap: int) -> int:
        """Add a command and return its row. The lock is not held while other ranks are asked for the last arrival."""
        shared = self.queues.shared_with_kernels(queue, node)
        work = node.work
        if node.last_arrival is not None:
            with self.lock:
                start = self.queues.earliest_start(queue, launch.start, gap)
            work += max(0, node.last_arrival(start + (shared.take_collective_delay() if shared else 0)) - start)
        with self.lock:
            row = self.queues.add(queue, launch, node._replace(work=work), gap)
            if node.kind == _COLLECTIVE:
                self.queues.wires[row] = node.work
            if shared:
                shared.add_collective(queue.tail - node.work, queue.tail)
            return row

    def _sync(
        self, host: HostThread, name: str, awaits: int, until: int, awaited: Awaited | None = None, kind: int = _SYNC,
        work: int | None = None,
    ) -> None:  # fmt: skip
        """The host waits for a lane, until a time, and by links for rows of other lanes."""
        work = self.device.host.sync if work is None else work
        if host.releases:
            host.add(_WORK, "", host.now, 0)  # a sync begins at once, whatever it waits for
        row = host.add(kind, name, max(host.now, until) + work, work, awaits)
        for source, _ in (awaited or {}).values():
            self.rows.link(source, row, LinkKind.ORDER)
