"""`torch.cuda.CUDAGraph` on the virtual GPU. What PyTorch builds on it in Python works unchanged."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from keepbusy.virtual.clock.lanes import Graph
from keepbusy.virtual.device_memory import PoolId
from keepbusy.virtual.machine import CURRENT, MACHINE, DeviceCall
from keepbusy.virtual.pytorch import pinned_uses, refusal
from keepbusy.virtual.pytorch.randomness import DEFAULTS, put_state, state_of
from keepbusy.virtual.pytorch.tensors import VALUES, tensors_in, to_host

# What a CUDA graph computes: recorded during its capture, computed again at each replay.
#
# While a stream captures, a GPU runs nothing. Here operators compute all the same, since PyTorch must
# know what comes of them; but when the capture ends, whatever they wrote into is as it was before, and
# their results hold nothing until the first replay. A replay computes the recorded steps into the same memory.

_aten = torch.ops.aten
_MAX_SIZE_RATIO = 2
"""A piece of memory serves again where no more than half of it would lie idle."""


class Arena:
    """Host memory of graphs that share a pool. What dies in a capture serves again in it, as on a GPU."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, Any]] = []  # size, address and storage
        self._returned: deque[Any] = deque()

    def take(self, size: int) -> Any:
        """A storage of at least so many bytes."""
        while self._returned:
            storage = self._returned.popleft()
            insort(self._free, (storage.nbytes(), storage.data_ptr(), storage))
        place = bisect_left(self._free, (size,))
        if place < len(self._free) and self._free[place][0] <= _MAX_SIZE_RATIO * size:
            return self._free.pop(place)[2]
        return _aten.empty.memory_format([size], dtype=torch.uint8).untyped_storage()

    def give_back(self, storage: Any) -> None:
        """Safe anywhere, also in a finalizer."""
        self._returned.append(storage)


class Recording:
    """One capture: its steps, and what must be undone when it ends."""

    def __init__(self, arena: Arena, generators: Iterable[Any]) -> None:
        self.arena = arena
        self._steps: list[Callable[[], object]] = []
        self._played = 0
        self._results: list[tuple[Tensor, Tensor]] = []  # results of the operator at work, and where they are kept
        self._kept: list[Tensor] = []
        self._addresses: set[int] = set()  # addresses of its memory
        self._before: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # what was written into, and what it held
        # by the address of what is behind it: the dispatcher makes a new Python object on its way
        self._states = {one._cdata: (one, state_of(one)) for one in generators}
        # by the state in the capture, the state in this replay
        self._replayed_states: dict[tuple[int, bytes], Tensor] = {}

    # during the capture

    def keep(self, tensor: Tensor) -> Tensor:
        """A new result, moved to the graph's own memory."""
        result = tensor
        if 0 in tensor.stride():
            tensor = tensor.contiguous()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage = self.arena.take((last + 1) * tensor.element_size() if tensor.numel() else 0)
        kept = _over(storage, 0, tensor)
        kept.copy_(tensor)
        self._results.append((result, kept))
        self._kept.append(kept)
        self._addresses.add(storage.data_ptr())
        return kept

    def about_to_write(self, *tensors: Tensor) -> None:
        """Remember what they hold, unless it is of this capture's making."""
        for one in tensors:
            place = (one.data_ptr(), one.shape, one.stride(), one.dtype)
            if place not in self._before and one.untyped_storage().data_ptr() not in self._addresses:
                self._before[place] = (one.detach(), one.clone())  # an operator may resize its view of them

    def repeat(self, compute: Callable[[], Any], out: Any) -> None:
        """An operator has computed `out`: at each replay, the same again, to where its results were kept."""
        kept = defaultdict[int, deque[Tensor]](deque)  # an operator may give the same result twice
        for tensor, place in self._results:
            kept[id(tensor)].append(place)
        targets = [kept[id(one)].popleft() if kept[id(one)] else None for one in tensors_in(out)]
        self._results.clear()

        def again() -> None:
            for target, found in zip(targets, tensors_in(compute()), strict=True):
                if target is not None:
                    target.copy_(found)

        self._steps.append(again if any(one is not None for one in targets) else compute)

    def run(self, does: Callable[[], object], *written: Tensor) -> None:
        """Do something now, and at each replay."""
        self.about_to_write(*written)
        does()
        self._steps.append(does)

    def draws_from(self, generator: Any) -> None:
        """A GPU must know before the capture whose random numbers a graph draws."""
        if generator._cdata not in self._states:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    def note_state(self, generator: Any, state: Tensor) -> None:
        """The program took a state, and may put it back: a replay has another one there."""
        if generator._cdata in self._states:
            place = (generator._cdata, state.numpy().tobytes())
            self.run(lambda: self._replayed_states.update({place: state_of(generator)}))

    def put_back(self, generator: Any, state: Tensor) -> None:
        place = (generator._cdata, state.numpy().tobytes())
        if place not in self._replayed_states and not torch.equal(state, self._states[generator._cdata][1]):
            raise NotImplementedError(
                "keepbusy's virtual GPU cannot put back, within a capture, a random state from before it."
            )
        self.run(lambda: put_state(generator, self._replayed_states.get(place, state)))

    def end(self) -> None:
        """Nothing has run: memory and random states are as they were, and results hold nothing."""
        with torch.inference_mode(False), torch.no_grad():
            for target, held in reversed(self._before.values()):
                target.copy_(held)
            for one in self._kept:
                one.fill_(float("nan")) if one.is_floating_point() or one.is_complex() else one.zero_()
        for generator, state in self._states.values():
            put_state(generator, state)
        for done in (self._before, self._kept, self._addresses, self._results):
            done.clear()

    # at replay

    def after_steps_so_far(self, does: Callable[[], object]) -> Callable[[], None]:
        """For what must wait until the device gets there: plays the steps so far, then does it."""
        so_far = len(self._steps)

        def catch_up() -> None:
            self._play(so_far)
            does()

        return catch_up

    def begin(self) -> None:
        self._played = 0
        for place, (generator, state) in self._states.items():
            self._replayed_states[place, state.numpy().tobytes()] = state_of(generator)

    def finish(self) -> None:
        """Play what has not been played since `begin`."""
        self._play(len(self._steps))

    def _play(self, until: int) -> None:
        steps, self._played = self._steps[self._played : until], until
        c = torch._C  # the program's own modes see nothing of what happens on the device
        with (
            torch.inference_mode(False), torch.no_grad(),
            c._DisableTorchDispatch(), c._DisableAutocast(), c.DisableTorchFunction(),
        ):  # fmt: skip
            for step in steps:
                step()


def lasting(tensor: Tensor) -> Tensor:
    """As `to_host`, but the device may give the tensor's memory to others: only the host's is kept."""
    storage = MACHINE.host_memory(tensor)
    with torch.inference_mode(False):
        if storage is not None:
            tensor = _over(storage, (tensor.data_ptr() - storage.data_ptr()) // tensor.element_size(), tensor)
        return to_host(tensor)  # never resized in place: that would move the memory


def _over(storage: Any, offset: int, like: Tensor) -> Tensor:
    """A plain host tensor: one made in inference mode could not be written to outside."""
    with torch.inference_mode(False):
        made = _aten.empty.memory_format([0], dtype=like.dtype)
        return _aten.set_.source_Storage_storage_offset(made, storage, offset, like.shape, like.stride())


_private_pools, _handles = count(1), count(1)
_arenas: WeakValueDictionary[PoolId, Arena] = WeakValueDictionary()
_dumping: list[bool] = []


def graph_pool_handle() -> PoolId:
    """A name for memory that several graphs share."""
    return 0, next(_handles)


class CUDAGraph:
    """What a stream was asked to do between `capture_begin` and `capture_end`, to be done again."""

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
        self._pool = pool if pool and any(pool) else (next(_private_pools), 0)
        MACHINE.memory.capture(self._device, self._pool, MACHINE.clock.capturing)
        if VALUES.real:
            arena = _arenas.setdefault(self._pool, Arena())
            MACHINE.recording = Recording(arena, [DEFAULTS(self._device), *self._generators])
        self._recording = MACHINE.recording
        if check_input_liveness:
            from torch.utils._cuda_debug import _CUDAGraphInputLivenessTracker

            self._tracker = _CUDAGraphInputLivenessTracker()
            self._tracker.start()

    def capture_end(self) -> None:
        """Whatever comes of the capture, it is over."""
        if self._tracker is not None:
            self._tracker.stop()
        if MACHINE.stream(CURRENT.device) != self._stream:
            MACHINE.memory.accesses.end_capture()
            raise RuntimeError("Capture must end on the same stream it began on.")
        try:
            self._graph = MACHINE.clock.end_capture(self._stream)
        except RuntimeError:
            MACHINE.memory.forget(self._device, self._pool)
            raise
        finally:
            MACHINE.memory.end_capture(self._device, self._pool)
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
            self._instantiate(self._graph)

    # what came of it

    def _captured(self, otherwise: str) -> Graph:
        if self._graph is None:
            raise RuntimeError(otherwise)
        return self._graph

    def instantiate(self) -> None:
        graph = self._captured("capture_end() must have been called before calling instantiate")
        if self._ready and not self._keep_graph:
            raise RuntimeError("instantiate() is intended to be called by the user only when keep_graph=true")
        self._instantiate(graph)

    def _instantiate(self, graph: Graph) -> None:
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
            self._tracker.check_alive(self.pool())
        if not self._ready:
            self._instantiate(graph)
        with DeviceCall("cudaGraphLaunch") as place:
            pinned_uses.forget_all_copied()
            MACHINE.memory.accesses.replay(self._uses, MACHINE.stream(self._device), place)
            if recording is not None:
                recording.begin()
            MACHINE.clock.replay(graph, MACHINE.stream(self._device))
            if recording is not None:
                recording.finish()

    def reset(self) -> None:
        if self._graph is not None and MACHINE is not None:  # Python takes modules apart before the last objects
            MACHINE.memory.forget(self._device, self._pool)
        self._graph = self._recording = self._tracker = None
        self._uses = ()
        self._ready = False
        self._generators.clear()

    __del__ = reset

    def pool(self) -> PoolId:
        self._captured("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    # looking into it

    def enable_debug_mode(self) -> None:
        _dumping.append(True)

    def debug_dump(self, debug_path: str) -> None:
        """The kernels by their names, for Graphviz."""
        if not _dumping and not self._keep_graph:
            warnings.warn("CUDA Graphs debug not enabled, set with [graph].enable_debug_mode()", stacklevel=2)
        elif self._graph is not None:
            names = [f'  n{at} [label="{node.name}"];' for at, node in enumerate(self._graph.nodes)]
            order = [f"  n{at} -> n{at + 1};" for at in range(len(names) - 1)]
            Path(debug_path).write_text("\n".join(["digraph dot {", *names, *order, "}", ""]), encoding="utf-8")

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
