"""`torch.cuda.CUDAGraph` on the virtual GPU. PyTorch's own Python code on top of it works unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Self
from weakref import WeakValueDictionary

import torch

from keepbusy.torch_names.dispatcher import check_inputs_alive, input_liveness
from keepbusy.virtual.clock.captures import Graph
from keepbusy.virtual.device_memory import PoolId
from keepbusy.virtual.machine import CURRENT, MACHINE, DeviceCall
from keepbusy.virtual.pytorch import pinned_uses, refusal
from keepbusy.virtual.pytorch.randomness import DEFAULTS
from keepbusy.virtual.pytorch.recordings import Arena, Recording
from keepbusy.virtual.pytorch.tensors import VALUES

_private_pools, _handles = count(1), count(1)
_arenas: WeakValueDictionary[PoolId, Arena] = WeakValueDictionary()
_dumping: list[bool] = []


def graph_pool_handle() -> PoolId:
    """A name for a pool of memory that several graphs share."""
    return 0, next(_handles)


class CUDAGraph:
    """The work launched on a stream between `capture_begin` and `capture_end`, which can be replayed."""

    _keep_graph: bool
    _generators: list[Any]
    _graph: Graph | None = None
    _recording: Recording | None = None
    _stream: int | None = None
    _ready = False
    _uses: Sequence[Any] = ()
    _tracker: Any = None

    def __new__(cls, keep_graph: bool = False) -> Self:
        self = super().__new__(cls)
        self._keep_graph, self._generators = keep_graph, []
        return self

    # capture

    def register_generator_state(self, generator: Any) -> None:
        self._generators.append(generator)

    def capture_begin(
        self, pool: PoolId | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        self._device, self._stream = CURRENT.device, MACHINE.stream(CURRENT.device)
        if self._ready:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        if self._stream == MACHINE.clock.default_stream(self._device):
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        MACHINE.clock.capture(self._stream, capture_error_mode)
        MACHINE.memory.accesses.begin_capture(MACHINE.clock.capturing)
        self._memory = MACHINE.memory  # a forked process has another one, without this graph's pool
        self._pool = pool if pool and any(pool) else (next(_private_pools), 0)
        self._memory.capture(self._device, self._pool, MACHINE.clock.capturing)
        if VALUES.real:
            arena = _arenas.setdefault(self._pool, Arena())
            MACHINE.recording = Recording(arena, [DEFAULTS(self._device), *self._generators])
        self._recording = MACHINE.recording
        if check_input_liveness:
            self._tracker = input_liveness()
            self._tracker.start()

    def capture_end(self) -> None:
        """End the capture, also if it has failed."""
        if self._tracker is not None:
            self._tracker.stop()
        if MACHINE.stream(CURRENT.device) != self._stream:
            MACHINE.memory.accesses.end_capture()
            raise RuntimeError("Capture must end on the same stream it began on.")
        try:
            self._graph = MACHINE.clock.end_capture(self._stream)
        except RuntimeError:
            self._memory.forget(self._device, self._pool)
            raise
        finally:
            self._memory.end_capture(self._device, self._pool)
            self._uses = MACHINE.memory.accesses.end_capture()
            MACHINE.recording = None
            if self._recording is not None:
                self._recording.end()
        if not self._graph.nodes:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
                "device or stream.",
                stacklevel=2,
            )
        if not self._keep_graph:
            self.instantiate()

    # after the capture

    def _captured(self, otherwise: str) -> Graph:
        if self._graph is None:
            raise RuntimeError(otherwise)
        return self._graph

    def instantiate(self) -> None:
        graph = self._captured("capture_end() must have been called before calling instantiate")
        if self._ready and not self._keep_graph:
            raise RuntimeError("instantiate() is intended to be called by the user only when keep_graph=true")
        self._ready = True
        MACHINE.clock.instantiate(graph)

    def replay(self) -> None:
        recording = self._recording
        graph = self._captured("Called CUDAGraph::replay without a preceding successful capture.")
        if MACHINE.captures(self._device):
            raise RuntimeError(
                "Cannot prepare for replay during capturing stage. during CUDA graph capture. If you need this call to "
                "be captured, please file an issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive"
            )
        if self._tracker is not None:
            check_inputs_alive(self._tracker, self.pool())
        if not self._ready:
            self.instantiate()
        with DeviceCall("cudaGraphLaunch") as place:
            pinned_uses.forget_all_copied()
            MACHINE.memory.accesses.replay(self._uses, MACHINE.stream(self._device), place)
            if recording is not None:
                recording.begin()
            MACHINE.clock.replay(graph, MACHINE.stream(self._device))
            if recording is not None:
                recording.play()

    def reset(self) -> None:
        if self._graph is not None:
            self._memory.forget(self._device, self._pool)
        self._graph = self._recording = self._tracker = None
        self._uses = ()
        self._ready = False
        self._generators.clear()

    __del__ = reset

    def pool(self) -> PoolId:
        self._captured("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    # inspection

    def enable_debug_mode(self) -> None:
        _dumping.append(True)

    def debug_dump(self, debug_path: str) -> None:
        """The kernels by their names, for Graphviz."""
        if not _dumping and not self._keep_graph:
            warnings.warn("CUDA Graphs debug not enabled, set with [graph].enable_debug_mode()", stacklevel=2)
        elif self._graph is not None:
            nodes = [f'  n{number} [label="{node.name}"];' for number, node in enumerate(self._graph.nodes)]
            edges = [f"  n{number} -> n{number + 1};" for number in range(len(nodes) - 1)]
            Path(debug_path).write_text("\n".join(["digraph dot {", *nodes, *edges, "}", ""]), encoding="utf-8")

    def raw_cuda_graph(self) -> NoReturn:
        if not self._keep_graph:
            raise RuntimeError(
                "You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with keep_graph=true"
            )
        self.get_graph_data()

    get_graph_data = refusal("has no cudaGraph_t behind a CUDAGraph")
    raw_cuda_graph_exec = refusal("has no cudaGraphExec_t behind a CUDAGraph")
    begin_capture_to_if_node = end_capture_to_conditional_node = refusal("has no conditional nodes in CUDA graphs")


class AcceleratorGraph(CUDAGraph):
    """Stands for `torch.accelerator.Graph`: the same, and what captures is its own `with`."""

    def __new__(
        cls, keep_graph: bool = False, *, pool: PoolId | None = None, capture_error_mode: str = "default"
    ) -> Self:
        self = super().__new__(cls, keep_graph)
        self.graph_pool, self.capture_error_mode = pool, capture_error_mode
        return self

    graph_pool: PoolId | None
    capture_error_mode: str

    def capture_begin(self) -> None:  # type: ignore[override]
        mode = self.capture_error_mode
        super().capture_begin(self.graph_pool, "global" if mode == "default" else mode)

    def __enter__(self) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        self.capture_begin()

    def __exit__(self, *error: object) -> None:
        self.capture_end()
