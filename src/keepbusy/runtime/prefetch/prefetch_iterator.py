"""`prefetch`: batches on the device before the loop asks for them, copied beside its compute.

A batch is packed into pinned memory, copied to the device as one, and split into its tensors there.
docs/explanation/prefetch.md shows why no batch is overwritten while it may be read. In short: its memory belongs to the
*loop's* stream, so the next owner of that memory comes after the batch's readers in that stream's order; and before the
copy stream writes, it waits for all work that was in the loop's stream when the memory was allocated.

How much of the copies ran beside the loop's own work is read from events that the device has passed, without waiting.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter_ns
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from keepbusy.runtime.prefetch.batch_layout import (
    BatchLayouts,
    BatchTree,
    JoinedBatch,
    JoinedTree,
    Layout,
    ReceivedBuffers,
    moves_itself,
    packable,
    pieces,
    with_packing_workers,
)
from keepbusy.torch_names.pytorch import foreach_copy, parse_to, tree_leaves

PACKING_TASKS = 16
"""Parallel tasks that pack a large batch."""
_TASK_BYTES = 512 << 10
"""Bytes that each task gets at least: on an H200 a step with 2.7 MB took 0.64 ms by four tasks, and 0.78 by ten. Fewer
bytes are packed before a thread is awake."""
_SERIAL_ELEMENTS = 1 << 15
"""Elements that a thread copies at once. For more PyTorch would start more threads beside each task."""
_WIDE = torch.int64
_REPORTED_SHARE = 0.01
"""Share of the time of a step below which a wait is noise."""
_SATURATED_SHARE = 0.95
"""Copies that take a larger share of the time cannot be hidden."""
_PACKED_MEGABYTES = 1.0
"""Megabytes of a batch below which packing takes the host only a few calls' time."""

Transform = Callable[[Any], Any]
Position = dict[str, Any]
"""A position to resume at: how many batches were delivered, and the loader's own state if it has one."""


def prefetch(loader: Any, depth: int = 2, device: Any = None, then: Transform | None = None) -> Prefetch:
    """The loader's batches, on the device, each copied while the loop computes on those before it.

        for batch in keepbusy.prefetch(loader, then=normalise):
            loss = step(batch)

    `loader` is any iterable. Its batches may be tensors, dicts, tuples, named tuples and dataclasses of them,
    pytrees of PyTorch, and objects with a `to`; anything else in them is left as it is.
    `depth` batches are kept ahead, so `depth + 2` are on the device at once. `then` runs on the device,
    on the stream of the copies, and returns the batch that the loop gets. The current stream may read a batch
    as any tensor of its own. Without CUDA this is a plain iterator over the loader, with `then`.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"prefetch got depth={depth!r} but needs at least one batch ahead: give depth=1 or more.")
    if hasattr(loader, "end_of_dataloader"):
        raise ValueError(
            "prefetch got a loader that `accelerator.prepare` made, which tells the accelerator with each batch "
            "whether it is the last: fetched ahead, it would say so too early. Have Accelerate copy without waiting: "
            "DataLoader(..., pin_memory=True) and DataLoaderConfiguration(non_blocking=True)."
        )
    target = None if device is None else torch.device(device)
    if torch.cuda.is_available() and target is not None and target.type != "cuda":
        raise ValueError(f"prefetch got device={str(device)!r} but copies to CUDA devices: give device='cuda' or none.")
    return Prefetch(loader, depth, target, then)


class Prefetch:
    """A loader whose batches are fetched ahead. Other attributes are those of the loader."""

    def __init__(self, loader: Any, depth: int, device: torch.device | None, then: Transform | None) -> None:
        self._loader, self._depth, self._device, self._then = loader, depth, device, then
        self._overlap = Overlap(depth)
        self._copy_streams: dict[torch.device, Any] = {}
        self._cursor = LoaderCursor(loader)
        self._packing: Any = None  # the loader iterated for a device
        self._resume: Position | None = None

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if not torch.cuda.is_available():
            self._cursor = LoaderCursor(self._loader, resume)
            return PlainIterator(self._cursor, self._then)
        if not getattr(self._packing, "persistent_workers", False):
            self._packing = with_packing_workers(self._loader)
        self._cursor = LoaderCursor(self._packing, resume)
        device = self._device
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        # one stream for all passes: memory that `then` allocates on one stream cannot be reused on another
        if device not in self._copy_streams:
            self._copy_streams[device] = torch.cuda.Stream(device)
        transfer = BatchTransfer(device, self._copy_streams[device], self._depth, self._then)
        return PrefetchIterator(self._cursor, transfer, self._depth, self._overlap)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # read before `__init__` has run, as by `copy`
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> Position:
        """The state from which to resume at the first batch that the loop has not had."""
        return self._cursor.position() if self._resume is None else self._resume

    def load_state_dict(self, state: Position) -> None:
        """Begin the next pass there: by the loader's own state if it has one, else by skipping earlier batches."""
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        self._resume = state

    def report(self) -> PrefetchReport:
        """How much of the copies was hidden so far, and why not all."""
        return self._overlap.report()


class LoaderItem(NamedTuple):
    """A batch of the loader, or what was made of it since, or an error in its place."""

    batch: Any
    errors: list[Exception]  # at most one; removed before it is raised, so that its traceback does not hold it
    position: Position  # from which to resume with this batch
    duration: int  # nanoseconds that the loader took

    def become(self, change: Callable[[Any], Any]) -> LoaderItem:
        """The item with the batch changed, or with the error that this raised."""
        if self.errors:
            return self
        try:
            return self._replace(batch=change(self.batch))
        except Exception as error:
            return self._replace(batch=None, errors=[error])


class LoaderCursor:
    """One pass over a loader, ahead of the loop. `loop_position` is where the loop is."""

    def __init__(self, loader: Any, resume: Position | None = None) -> None:
        self._loader, self.loop_position = loader, resume
        self._delivered = resume["delivered"] if resume else 0
        self._skip = 0 if resume and "loader" in resume else self._delivered
        self._batches: Iterator[Any] | None = None
        self._end: Position | None = None
        self._ended = False

    def position(self) -> Position:
        """The position of the batch that the loop gets next."""
        return self.loop_position or self._end or self._loader_position()

    def advance(self) -> LoaderItem | None:
        """The next batch, or the error in its place; None at the end."""
        if self._ended:
            return None
        began = perf_counter_ns()
        if self._batches is None:
            self._batches, self.loop_position = iter(self._loader), None
            while self._skip and not self._ended:
                self._next()
                self._skip -= 1
        position = self._loader_position()
        batch, errors = self._next()
        if self._ended:
            self._end = position  # the loader, asked once more than the loop, may already be at its next pass
            return None
        self._delivered += 1
        return LoaderItem(batch, errors, position, perf_counter_ns() - began)

    def rewind(self) -> None:
        """The loop has had all batches: begin the next pass at the first batch."""
        self.close()
        self._delivered, self.loop_position, self._end = 0, None, None

    def close(self) -> None:
        """Drop the loader's iterator, which ends its workers, or runs a generator's `finally`."""
        self._batches, self._ended = None, True

    def _loader_position(self) -> Position:
        state = {"loader": self._loader.state_dict()} if hasattr(self._loader, "state_dict") else {}
        return {"delivered": self._delivered, **state}

    def _next(self) -> tuple[Any, list[Exception]]:
        if self._batches is None:
            return None, []
        try:
            return next(self._batches), []
        except StopIteration:
            self.close()
        except Exception as error:
            return None, [error]
        return None, []


class PlainIterator:
    """The iterator without a device."""

    def __init__(self, cursor: LoaderCursor, then: Transform | None) -> None:
        self._cursor, self._then = cursor, then

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = self._cursor.advance()
        if item is None:
            self._cursor.rewind()
            raise StopIteration
        if item.errors:
            raise item.errors.pop()
        return item.batch if self._then is None else self._then(item.batch)

    def close(self) -> None:
        self._cursor.close()

    def __del__(self) -> None:
        self.close()


class PrefetchIterator:
    """The iterator with a device: `depth` batches are ahead of the loop, and another one is being packed."""

    def __init__(self, cursor: LoaderCursor, transfer: BatchTransfer, depth: int, overlap: Overlap) -> None:
        self._cursor, self._transfer, self._depth, self._overlap = cursor, transfer, depth, overlap
        self._packing: LoaderItem | None = None
        self._waiting: deque[LoaderItem] = deque()
        self._loading = 0
        overlap.begin()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        stream, began = torch.cuda.current_stream(self._transfer.device), perf_counter_ns()
        requested = _timed_event(stream)
        self._loading = 0
        for _ in range(2):  # at most two batches a call, so the lead grows gradually
            if len(self._waiting) > self._depth:
                break
            packing, self._packing = self._packing or self._pack_next(), None
            if packing is None:
                break
            packed = packing.become(self._transfer.read)
            try:
                self._packing = self._pack_next()  # which is packed while this one is sent
            finally:  # also when the user interrupts the loader
                self._waiting.append(packed.become(self._transfer.send))
        if not self._waiting:
            self._cursor.rewind()
            self.close()
            raise StopIteration
        batch, errors, _, _ = self._waiting.popleft()
        following = self._waiting[0] if self._waiting else self._packing
        self._cursor.loop_position = following.position if following is not None else None
        if errors:
            raise errors.pop()
        packing_time = perf_counter_ns() - began - self._loading
        self._overlap.add(Handover(requested, batch.admit(stream), self._loading, packing_time, batch.events))
        return batch.batch

    def close(self) -> None:
        """Drop the loader and the pinned memory. Batches being copied arrive before their memory is reused."""
        self._transfer.wait()
        self._cursor.close()
        self._transfer.close()
        for item in self._waiting:
            if not item.errors:
                item.batch.admit(item.batch.loop_stream)
        self._waiting.clear()
        self._packing = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _pack_next(self) -> LoaderItem | None:
        """Fetch and pack the next batch. Earlier ones are packed already, so the loader may reuse its memory."""
        item = self._cursor.advance()
        if item is None:
            return None
        self._loading += item.duration
        return item.become(self._transfer.pack)


@cache
def _script() -> Any:
    """Packing in PyTorch's own threads, which do not need Python's lock; None if PyTorch cannot compile it.

    A Python thread would wait for the lock, which a loop that launches kernels releases for too short a time. Lists are
    not sliced here: PyTorch's compiler assumes that nobody sees writes to the tensors of a slice, and removes them. No
    function of `torch` is called either: a program that is being fixed has others in their place.
    """
    try:
        return torch.jit.CompilationUnit(f"""
def copy(
    targets: List[Tensor], sources: List[Tensor], large: List[Tuple[Tensor, Tensor]], task: int, tasks: int
) -> int:
    for place in range(task, len(targets), tasks):
        targets[place].copy_(sources[place])
    for target, source in large:
        begin, end = source.numel() * task // tasks, source.numel() * (task + 1) // tasks
        for start in range(begin, end, {_SERIAL_ELEMENTS}):
            stop = min(start + {_SERIAL_ELEMENTS}, end)
            target[start:stop].copy_(source[start:stop])
    return 1

def pack(targets: List[Tensor], sources: List[Tensor], large: List[Tuple[Tensor, Tensor]], tasks: int) -> int:
    copies: List[Future[int]] = []
    for task in range(tasks):
        copies.append(torch.jit.fork(copy, targets, sources, large, task, tasks))
    done = 0
    for task_copy in copies:
        done += torch.jit.wait(task_copy)
    return done

def begin(targets: List[Tensor], sources: List[Tensor], large: List[Tuple[Tensor, Tensor]], tasks: int) -> Future[int]:
    return torch.jit.fork(pack, targets, sources, large, tasks)
""")
    except Exception:
        return None


class PinnedBuffer:
    """One batch's pinned memory, kept for the next batch."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: Layout | None = None
        self._pieces: list[Tensor] = []
        self._large: list[int] = []  # places of pieces of which each task writes a part
        self._small: list[int] = []  # places of pieces that one task writes
        self._targets: list[Tensor] = []
        self._tasks = 0
        self._packing: Any = None  # a future of the tasks
        self.read: torch.cuda.Event | None = None
        """Recorded when the device has read the memory and `sources`."""
        self.sources: list[Tensor] = []
        """Pinned tensors copied directly, kept until then, since freed pinned memory may be reused."""

    def release(self) -> None:
        """Wait until the device has read the memory, and for nothing else."""
        self.wait()
        if self.read is not None:
            self.read.synchronize()
        self.read, self.sources = None, []

    def pack(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Write the tensors that are copied together, or start the tasks that do."""
        sources = [tensors[index] for index in layout.order[: layout.together]]
        if layout is not self._layout:
            self._lay_out(layout, sources)
        if self._tasks:
            small = [sources[place] for place in self._small] if self._large else sources
            large = [_elements(self._pieces[place], sources[place]) for place in self._large]
            self._packing = _script().begin(self._targets, small, large, self._tasks)
        elif sources:
            foreach_copy(self._pieces, sources)

    def wait(self) -> None:
        """Wait until all is written."""
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.wait()

    def _lay_out(self, layout: Layout, sources: list[Tensor]) -> None:
        if layout.packed > self.memory.numel():
            self.memory = torch.empty(layout.packed, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._pieces, self._layout = pieces(self.memory[: layout.packed], layout), layout
        self._tasks = min(PACKING_TASKS, layout.packed // _TASK_BYTES) if _script() is not None else 0
        self._small, self._large = [], []
        for place, (target, source) in enumerate(zip(self._pieces, sources, strict=True)):
            large = target.numel() > _SERIAL_ELEMENTS and target.stride() == source.stride()
            (self._large if large else self._small).append(place)
        self._targets = [self._pieces[place] for place in self._small]


def _elements(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Two dense tensors of the same strides as flat ones, with elements of eight bytes if possible."""
    target, source = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (target, source))
    size, begin = source.nbytes, source.storage_offset() * source.itemsize
    if source.is_complex() or source.is_neg() or size % _WIDE.itemsize or begin % _WIDE.itemsize:
        return target, source
    return target.view(_WIDE), source.view(_WIDE)


class PackedBatch(NamedTuple):
    """The parts of a batch whose bytes are being packed."""

    tree: BatchTree
    as_bytes: list[int]  # places of the leaves that are copied as bytes
    others: list[int]
    layout: Layout
    buffer: PinnedBuffer


@dataclass
class DeviceBatch:
    """A batch whose copies are issued. A stream must `admit` it before it is dropped."""

    batch: Any
    memory: list[Tensor]
    loop_stream: Any  # the loop's stream when the copies were issued
    events: CopyEvents

    def admit(self, stream: Any) -> Any:
        """Let later work of the stream read the batch. Returns an event recorded before that."""
        delivered = _timed_event(stream)
        self.loop_stream.wait_event(self.events.ready)
        if stream != self.loop_stream:
            stream.wait_event(self.events.ready)
        for tensor in self.memory:
            tensor.record_stream(stream)  # the allocator ignores it for the stream's own memory
        return delivered


class BatchTransfer:
    """Copies batches to a device, by pinned memory and a stream.

    Other threads only fill the pinned memory. All else happens in the loop's thread, so its order is always the same.
    """

    def __init__(self, device: torch.device, copy_stream: Any, depth: int, then: Transform | None) -> None:
        self.device, self._copy_stream, self._then = device, copy_stream, then
        # for each batch ahead, for the loop's batch and for the batch being packed
        self._buffers = deque(PinnedBuffer() for _ in range(depth + 2))
        self._received, self._layouts = ReceivedBuffers(device), BatchLayouts()

    def pack(self, batch: Any) -> PackedBatch:
        """Begin to pack a batch. The host waits for pinned memory if it is too far ahead of the device."""
        self._buffers.rotate()
        buffer = self._buffers[0]
        buffer.release()
        if isinstance(batch, JoinedBatch):
            self._received.hold(batch.joined)
        tree = JoinedTree(batch) if isinstance(batch, JoinedBatch) else BatchTree(batch)
        as_bytes, others, layout = self._layouts.of(tree.leaves)
        buffer.pack(layout, [tree.leaves[place] for place in as_bytes])
        return PackedBatch(tree, as_bytes, others, layout, buffer)

    def read(self, packed: PackedBatch) -> PackedBatch | DeviceBatch:
        """Wait until the loader may reuse its memory: all is packed, or sent if something moves itself."""
        packed.buffer.wait()
        leaves = [packed.tree.leaves[place] for place in packed.others]
        return self.send(packed) if any(isinstance(leaf, Tensor) or moves_itself(leaf) for leaf in leaves) else packed

    def send(self, packed: PackedBatch | DeviceBatch) -> DeviceBatch:
        """Issue the batch's copies, unless that is done."""
        if isinstance(packed, DeviceBatch):
            return packed
        loop_stream = torch.cuda.current_stream(self.device)
        memory = torch.empty(packed.layout.size, dtype=torch.uint8, device=self.device)
        try:
            return self._send(packed, memory, loop_stream)
        except Exception:
            loop_stream.wait_stream(self._copy_stream)  # the memory goes back to it now
            raise

    def wait(self) -> None:
        """Wait until no task reads memory of the loader."""
        for buffer in self._buffers:
            buffer.wait()

    def close(self) -> None:
        """Drop the buffers; PyTorch keeps pinned memory until copies from it are done."""
        self._buffers.clear()
        self._received.close(self._copy_stream)

    def _send(self, packed: PackedBatch, memory: Tensor, loop_stream: Any) -> DeviceBatch:
        tree, as_bytes, others, layout, buffer = packed
        targets, leaves = pieces(memory, layout), list(tree.leaves)
        alone = [leaves[as_bytes[index]] for index in layout.order[layout.together :]]
        for index, target in zip(layout.order, targets, strict=True):
            leaves[as_bytes[index]] = target
        for place in others:
            if isinstance(leaves[place], Tensor):  # of an unusual kind: moved now, on the loop's stream
                leaves[place] = leaves[place].to(self.device, non_blocking=True)
        self._copy_stream.wait_stream(loop_stream)
        unpacked: list[Tensor] = []
        with torch.cuda.stream(self._copy_stream):
            begun = _timed_event(self._copy_stream)
            if layout.packed:
                memory[: layout.packed].copy_(buffer.memory[: layout.packed], non_blocking=True)
            for target, source in zip(targets[layout.together :], alone, strict=True):
                target.copy_(source, non_blocking=True)
            copied = _timed_event(self._copy_stream)
            buffer.read, buffer.sources = copied, alone
            if others or self._then is not None:
                batch, unpacked = self._finish(tree, leaves, others, memory, loop_stream)
                ready = _timed_event(self._copy_stream)
            else:
                batch, ready = tree.close(iter(leaves), self._bring), copied
        events = CopyEvents(begun, copied, ready, layout.size, layout.packed, layout.pageable)
        return DeviceBatch(batch, [memory, *unpacked], loop_stream, events)

    def _finish(
        self, tree: BatchTree, leaves: list[Any], others: list[int], memory: Tensor, loop_stream: Any
    ) -> tuple[Any, list[Tensor]]:
        """Move what cannot be packed, and call `then`. Returns the batch, and the tensors that this made."""
        moves = NonpackableMoves(self.device, self._copy_stream, loop_stream)
        for place in others:
            if moves_itself(leaves[place]):
                leaves[place] = moves.move(leaves[place])
        batch = tree.close(iter(leaves), self._bring)
        if self._then is not None:
            batch = self._then(batch)
            moves.add_tensors_of(batch, memory)
        return batch, moves.made

    def _bring(self, value: Any) -> Any:
        return value.to(self.device)


class NonpackableMoves(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """Moves what cannot be packed: objects with their own `to`, and tensors of unusual kinds.

    Objects move on the copy stream, with their tensors copied to pinned memory first. Tensors made meanwhile are in
    memory of the copy stream; they are in `made`, and the loop's stream must be recorded on them.
    """

    def __init__(self, device: torch.device, copy_stream: Any, loop_stream: Any) -> None:
        super().__init__()
        self._device, self._copy_stream, self._loop_stream = device, copy_stream, loop_stream
        self.made: list[Tensor] = []

    def move(self, value: Any) -> Any:
        with self:
            return value.to(self._device)

    def add_tensors_of(self, batch: Any, memory: Tensor) -> None:
        """Add to `made` all tensors of the batch that are not in this memory."""
        storage = memory.untyped_storage()._cdata
        for leaf in BatchTree(batch).leaves:
            if isinstance(leaf, Tensor):
                lies_there = leaf.layout is torch.strided and leaf.untyped_storage()._cdata == storage
                self.made += [leaf] if leaf.is_cuda and not lies_there else []
            elif moves_itself(leaf):
                self.move(leaf)  # it is on the device already; this finds its tensors

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not Tensor.to or args[0].is_cuda:
            result = function(*args, **kwargs)
        elif packable(args[:1]):
            device, dtype, _, layout = parse_to(*args[1:], **kwargs)
            layout = torch.preserve_format if layout is None else layout
            result = args[0].pin_memory().to(device, dtype, non_blocking=True, memory_format=layout)
        else:
            with torch.cuda.stream(self._loop_stream):  # unusual kinds cannot be recorded on another stream than theirs
                result = function(*args, **kwargs)
            self._copy_stream.wait_stream(self._loop_stream)
        self.made += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_cuda]
        return result


def _timed_event(stream: Any) -> Any:
    """An event of the stream with its time; a host that waits for it sleeps."""
    return stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))


class CopyEvents(NamedTuple):
    """The copies of a batch: events of their stream, and how many bytes."""

    begun: Any
    copied: Any
    ready: Any  # after the work that follows the copies
    size: int
    packed: int  # bytes that the host packed first
    pageable: int  # packed bytes that need no packing if they are pinned


class Handover(NamedTuple):
    """A batch given to the loop."""

    requested: Any  # event of the loop's stream when the loop asked for the batch
    delivered: Any  # event of the loop's stream before the work on the batch
    loading: int  # nanoseconds that the host waited for the loader in between
    packing: int  # nanoseconds for packing and issuing copies in between
    copies: CopyEvents


@dataclass(frozen=True)
class PrefetchReport:
    """The figures of prefetching so far, for `print`. Times are nanoseconds of the device, sizes are bytes."""

    depth: int
    batches: int = 0
    time: int = 0
    size: int = 0
    packed: int = 0
    pageable: int = 0
    copies: int = 0
    exposed: int = 0
    loader_late: int = 0
    packing: int = 0

    @property
    def hidden(self) -> float:
        """The share of the copies that the loop did not wait for."""
        return 1 - min(self.exposed, self.copies) / self.copies if self.copies else 1.0

    def __str__(self) -> str:
        if not self.batches:
            return "Nothing was measured yet: no second batch has come from a CUDA device."
        copied = f"{self.copies / self.batches / 1e6:.3g} ms for {self.size / self.batches / 1e6:.3g} MB"
        lines = [f"{self.hidden:.1%} of the copies were hidden ({self.batches} batches, {copied} each)."]
        copies_reason = f"because depth={self.depth} is too shallow for steps so uneven: try depth={2 * self.depth}."
        if self.copies > _SATURATED_SHARE * self.time:
            copies_reason = "which outlast the work beside them: send fewer bytes, such as uint8 made float by `then`."
        packed = self.packed / self.batches / 1e6
        packing_reason = f"packed {packed:.3g} MB: give the loader workers, which join small tensors (num_workers)."
        if packed < _PACKED_MEGABYTES:
            packing_reason = "has no lead over it: every call counts, also those that issue copies."
        elif 2 * self.pageable > self.packed:
            packing_reason = f"packed {packed:.3g} MB: let the loader pin its memory (pin_memory=True)."
        reasons = (
            (self.exposed, f"copies, {copies_reason}"),
            (self.packing, f"the host, which {packing_reason}"),
            (self.loader_late, "the loader, which is late: give it more workers."),
        )
        for time, reason in reasons:
            if time > _REPORTED_SHARE * self.time:
                lines.append(f"The GPU waited {time / self.batches / 1e6:.3g} ms a batch for {reason}")
        return "\n".join(lines)


class Overlap:
    """The sums of a report, over batches whose events the device has passed."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._sums: Counter[str] = Counter()
        self._pending: deque[Handover] = deque()
        self._previous_delivery: Any = None  # event of the previous batch

    def add(self, handover: Handover) -> None:
        self._pending.append(handover)
        self._settle()

    def begin(self) -> None:
        """A pass over the loader begins. Its first copy cannot be hidden, so it is not counted."""
        self._settle()
        self._pending.clear()
        self._previous_delivery = None

    def report(self) -> PrefetchReport:
        self._settle()
        return PrefetchReport(self._depth, **self._sums)

    def _settle(self) -> None:
        while self._pending and self._pending[0].delivered.query() and self._pending[0].copies.ready.query():
            handover, previous = self._pending.popleft(), self._previous_delivery
            self._previous_delivery = handover.delivered
            if previous is None:
                continue
            idle = _between(handover.requested, handover.delivered)
            exposed = _between(handover.delivered, handover.copies.ready)
            if exposed:  # copies of an earlier call ended last; a faster host would have waited for them, too
                idle, exposed = 0, exposed + idle
            packing = min(idle, handover.packing)  # the host packs last in its call
            self._sums.update(
                batches=1,
                time=_between(previous, handover.delivered),
                size=handover.copies.size,
                packed=handover.copies.packed,
                pageable=handover.copies.pageable,
                copies=_between(handover.copies.begun, handover.copies.copied),
                exposed=exposed,
                loader_late=min(idle - packing, handover.loading),
                packing=packing,
            )


def _between(first: Any, second: Any) -> int:
    """Nanoseconds from an event to a second one; 0 if that was earlier."""
    return max(0, round(first.elapsed_time(second) * 1e6))
