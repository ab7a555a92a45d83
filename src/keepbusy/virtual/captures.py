"""The clock's CUDA graphs: what is launched on a capturing stream is kept, and runs at each replay."""

from __future__ import annotations

from threading import get_ident

from keepbusy.timeline.model import Kind
from keepbusy.virtual.device import Way
from keepbusy.virtual.graphs import CAPTURED_EVENT, ILLEGAL, INVALID, INVALIDATED, ISOLATION, UNJOINED, Graph, Node
from keepbusy.virtual.host_thread import Host
from keepbusy.virtual.queues import Queues
from keepbusy.virtual.streams import Moment, Stream

_WORK_OF_COPY = int(Kind.COPY)


class Captures(Queues):
    """Beginning, joining and ending a capture, and running what came of it."""

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
            for one in [lane for lane, held in self._captures.items() if held is graph]:
                del self._captures[one]
            if graph.failed:
                raise self._error(INVALIDATED)
            if not graph.joined:
                raise self._error(UNJOINED)
            return graph

    def instantiate(self, graph: Graph) -> None:
        """Make it ready to be launched."""
        with self.lock:
            costs = self.device.host
            self._work(self._arrive(), costs.graph_made + costs.graph_node_made * len(graph.nodes), "")

    def replay(self, graph: Graph, stream: int) -> None:
        """One launch, all commands of the graph: each branch in its order, beside the others."""
        with self.lock:
            host, line, costs = self._arrive(), self._streams[stream], self.device.host
            self._refuse("cudaGraphLaunch", self._captures.get(stream), unsafe=False)
            if not graph.nodes:
                return
            self._marks.setdefault(graph.mark, [])
            host.marks.append(graph.mark)
            call = self._call(host, line, "cudaGraphLaunch", costs.graph + costs.graph_node * len(graph.nodes))
            lines, before = self._branches(graph, line), [(row, line.until()) for row in line.before()]
        ends: dict[int, list[tuple[int, int]]] = {one: [] for one in lines}
        for number, node in enumerate(graph.nodes):
            self._run(node, lines[node.stream], call, ends, before if number else [])
        with self.lock:
            line.awaited += [ends[one][-1] for one in graph.loose()]

    def _run(
        self,
        node: Node,
        line: Stream,
        call: tuple[int, int],
        ends: dict[int, list[tuple[int, int]]],
        before: list[tuple[int, int]],
    ) -> None:
        """A command of a graph. `ends`: rows and ends so far; `before`: what a branch's beginning waits for."""
        mine, queue = ends[node.stream], self.device.queue
        gap = queue.graph_gap if mine else queue.gap
        with self.lock:
            line.awaited += [ends[other][count - 1] for other, count in node.after] or ([] if mine else before)
            start = self._ready(line, call, gap)
        last = start if node.meet is None else max(start, node.meet(start))  # other ranks are asked without the lock
        work = last + node.work - start
        with self.lock:
            row = self._command(line, call, node.kind, node.name, start, work, node.size, group=node.group, gap=gap)
        mine.append((row, start + work))

    # with the lock held

    def _branches(self, graph: Graph, line: Stream) -> dict[int, Stream]:
        """Where the commands of each captured stream run: the first ones on `line`, others on lanes beside it."""
        first, *others = graph.streams()
        found = {first: line}
        for number, one in enumerate(others):
            if (line.lane, number) not in self._beside:
                self._beside[line.lane, number] = self.new_stream(line.device)
            found[one] = self._streams[self._beside[line.lane, number]]
        return found

    def _capture_copy(self, host: Host, stream: int, way: Way, size: int, non_blocking: bool) -> None:
        graph = self._captured(stream)
        if not (non_blocking and way.returns):
            self._refuse("cudaMemcpyAsync" if non_blocking else "cudaStreamSynchronize", graph)
        graph.add(stream, _WORK_OF_COPY, way.name, way.work, size)
        self._work(host, way.call, "")

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
        mine = self._captures.get(stream)
        if moment.graph is None or mine not in (None, moment.graph):
            if mine is not None:
                mine.failed = True
            raise self._error(ISOLATION)
        self._captures[stream] = moment.graph
        moment.graph.join(stream, moment.reached)
