"""Batches on their way to the device: packed into pinned memory, copied as one, and cut into their tensors there.

Why none is overwritten while somebody may read it is argued in docs/explanation/prefetch.md. In short: its
memory belongs to the *loop's* stream, so whoever gets that memory next comes after the batch's readers in that
stream's order; and before the copy stream writes, it waits for all that the loop's stream held when the
memory was taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from keepbusy.runtime.prefetch.batch_layout import BatchLayouts, BatchTree, Layout, moves_itself, packable, pieces
from keepbusy.runtime.prefetch.overlap import CopyEvents
from keepbusy.runtime.prefetch.worker_batches import JoinedBatch, JoinedTree, ReceivedBuffers

PACKING_TASKS = 16
"""Into so many parts a batch is packed at once, if it has enough bytes for them."""
_TASK_BYTES = 512 << 10
"""So many at least for each: on an H200 a step with 2.7 MB took 0.64 ms by four tasks, and 0.78 by ten. What is less is
packed before a thread is awake."""
_SERIAL_ELEMENTS = 1 << 15
"""So many at once a thread copies by itself. For more PyTorch would start a team of threads beside each of these."""
_WIDE = torch.int64

Transform = Callable[[Any], Any]


@cache
def _script() -> Any:
    """Packing in PyTorch's own threads, which never want Python's lock; None in a PyTorch that compiles no such thing.

    A thread of Python's that is woken waits for it, and a loop that launches kernels lets go of that for too short a
    time to take it. A list is not sliced here: PyTorch's compiler believes that nobody sees what is written to the
    tensors of a slice, and leaves the writing out. Nor is a function of `torch` called: a program that is being fixed
    has others in their place.
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
    for one in copies:
        done += torch.jit.wait(one)
    return done

def begin(targets: List[Tensor], sources: List[Tensor], large: List[Tuple[Tensor, Tensor]], tasks: int) -> Future[int]:
    return torch.jit.fork(pack, targets, sources, large, tasks)
""")
    except Exception:
        return None


class PinnedBuffer:
    """One batch's pinned memory, kept for the next batch."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._pieces: list[Tensor] = []
        self._large: list[int] = []  # of which of them each task writes a part
        self._small: list[int] = []  # and which one task writes, and these
        self._targets: list[Tensor] = []
        self._tasks = 0
        self._packing: Any = None  # tells when they are done
        self.read: torch.cuda.Event | None = None
        """The device is done with it, and with what it copies from beside it."""
        self.sources: list[Tensor] = []
        """These stay until then: pinned memory that is let go may be given out again."""

    def release(self) -> None:
        """Wait until the device has read it, by the event of the copies out of it alone."""
        self.wait()
        if self.read is not None:
            self.read.synchronize()
        self.read, self.sources = None, []

    def pack(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Write what travels together, or let threads begin to."""
        sources = [tensors[index] for index in layout.order[: layout.together]]
        if layout is not self._layout:
            self._lay_out(layout, sources)
        if self._tasks:
            small = [sources[place] for place in self._small] if self._large else sources
            large = [_elements(self._pieces[place], sources[place]) for place in self._large]
            self._packing = _script().begin(self._targets, small, large, self._tasks)
        elif sources:
            torch._foreach_copy_(self._pieces, sources)

    def wait(self) -> None:
        """Until all is written."""
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.wait()

    def _lay_out(self, layout: Layout, sources: list[Tensor]) -> None:
        if layout.packed > self.memory.numel():
            self.memory = torch.empty(layout.packed, dtype=torch.uint8, pin_memory=True)
        self._pieces, self._layout = pieces(self.memory[: layout.packed], layout), layout
        self._tasks = min(PACKING_TASKS, layout.packed // _TASK_BYTES) if _script() is not None else 0
        self._small, self._large = [], []
        for place, (target, source) in enumerate(zip(self._pieces, sources, strict=True)):
            large = target.numel() > _SERIAL_ELEMENTS and target.stride() == source.stride()
            (self._large if large else self._small).append(place)
        self._targets = [self._pieces[place] for place in self._small]


def _elements(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both, without gaps and of the same strides, as rows of elements: of eight bytes each where they can be."""
    target, source = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (target, source))
    size, begin = source.nbytes, source.storage_offset() * source.itemsize
    if source.is_complex() or source.is_neg() or size % _WIDE.itemsize or begin % _WIDE.itemsize:
        return target, source
    return target.view(_WIDE), source.view(_WIDE)


class PackedBatch(NamedTuple):
    """A batch taken apart, while its bytes are packed."""

    tree: BatchTree
    as_bytes: list[int]  # places of the leaves that travel as bytes
    others: list[int]
    layout: Layout
    buffer: PinnedBuffer


@dataclass
class DeviceBatch:
    """A batch whose copies are issued. Before it is dropped, a stream must `admit` it."""

    batch: Any
    memory: list[Tensor]
    loop_stream: Any  # the stream that was the loop's when the copies were issued
    events: CopyEvents

    def admit(self, stream: Any) -> Any:
        """What the stream does from here on may read the batch. Returns the event before it."""
        asked = timed_event(stream)
        self.loop_stream.wait_event(self.events.ready)
        if stream != self.loop_stream:
            stream.wait_event(self.events.ready)
        for tensor in self.memory:
            tensor.record_stream(stream)  # the allocator ignores it for memory that is the stream's own
        return asked


class BatchTransfer:
    """The way to a device: pinned memory for the batches that are on it, and a stream.

    The threads that fill that memory copy from host memory to host memory and do nothing else. The rest happens in the
    loop's thread, so a program does the same things in the same order every time.
    """

    def __init__(self, device: torch.device, copy_stream: Any, depth: int, then: Transform | None) -> None:
        self.device, self._copy_stream, self._then = device, copy_stream, then
        # one for each batch ahead, one for the loop's, and one for that which is being packed
        self._buffers = deque(PinnedBuffer() for _ in range(depth + 2))
        self._received, self._layouts = ReceivedBuffers(device), BatchLayouts()

    def pack(self, batch: Any) -> PackedBatch:
        """Take it apart and begin to pack it. The host waits for pinned memory if it is too far ahead of the device."""
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
        """Wait until the loader may have its memory again: all is packed or, where something moves by itself, sent."""
        packed.buffer.wait()
        leaves = [packed.tree.leaves[place] for place in packed.others]
        return self.send(packed) if any(isinstance(one, Tensor) or moves_itself(one) for one in leaves) else packed

    def send(self, packed: PackedBatch | DeviceBatch) -> DeviceBatch:
        """Issue its copies, unless that is done."""
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
        """Until no thread reads memory of the loader."""
        for buffer in self._buffers:
            buffer.wait()

    def close(self) -> None:
        """PyTorch keeps pinned memory until the copies out of it are done."""
        self._buffers.clear()
        self._received.close(self._copy_stream)

    def _send(self, packed: PackedBatch, memory: Tensor, loop_stream: Any) -> DeviceBatch:
        tree, as_bytes, others, layout, buffer = packed
        targets, leaves = pieces(memory, layout), list(tree.leaves)
        alone = [leaves[as_bytes[index]] for index in layout.order[layout.together :]]
        for index, target in zip(layout.order, targets, strict=True):
            leaves[as_bytes[index]] = target
        for place in others:
            if isinstance(leaves[place], Tensor):  # of an unusual kind: it moves at once, on the loop's stream
                leaves[place] = leaves[place].to(self.device, non_blocking=True)
        self._copy_stream.wait_stream(loop_stream)
        made: list[Tensor] = []
        with torch.cuda.stream(self._copy_stream):
            begun = timed_event(self._copy_stream)
            if layout.packed:
                memory[: layout.packed].copy_(buffer.memory[: layout.packed], non_blocking=True)
            for target, source in zip(targets[layout.together :], alone, strict=True):
                target.copy_(source, non_blocking=True)
            copied = timed_event(self._copy_stream)
            buffer.read, buffer.sources = copied, alone
            if others or self._then is not None:
                batch, made = self._finish(tree, leaves, others, memory, loop_stream)
                ready = timed_event(self._copy_stream)
            else:
                batch, ready = tree.close(iter(leaves), self._bring), copied
        events = CopyEvents(begun, copied, ready, layout.size, layout.packed, layout.pageable)
        return DeviceBatch(batch, [memory, *made], loop_stream, events)

    def _finish(
        self, tree: BatchTree, leaves: list[Any], others: list[int], memory: Tensor, loop_stream: Any
    ) -> tuple[Any, list[Tensor]]:
        """What cannot be packed moves itself, and `then` is called: the batch, and the tensors that this made."""
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
    """What cannot be packed: objects that move themselves, by their own `to`, and tensors of unusual kinds.

    While objects do so on the copy stream, their tensors travel by pinned memory. What is made meanwhile lies in memory
    of the copy stream. `made` is what the loop's stream must be recorded on.
    """

    def __init__(self, device: torch.device, copy_stream: Any, loop_stream: Any) -> None:
        super().__init__()
        self._device, self._copy_stream, self._loop_stream = device, copy_stream, loop_stream
        self.made: list[Tensor] = []

    def move(self, value: Any) -> Any:
        with self:
            return value.to(self._device)

    def add_tensors_of(self, batch: Any, known: Tensor) -> None:
        """To `made`, all in the batch that does not lie in this memory."""
        storage = known.untyped_storage()._cdata
        for leaf in BatchTree(batch).leaves:
            if isinstance(leaf, Tensor):
                lies_there = leaf.layout is torch.strided and leaf.untyped_storage()._cdata == storage
                self.made += [leaf] if leaf.is_cuda and not lies_there else []
            elif moves_itself(leaf):
                self.move(leaf)  # it is there already: it only shows its tensors

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not Tensor.to or args[0].is_cuda:
            made = function(*args, **kwargs)
        elif packable(args[:1]):
            device, dtype, _, layout = torch._C._nn._parse_to(*args[1:], **kwargs)
            layout = torch.preserve_format if layout is None else layout
            made = args[0].pin_memory().to(device, dtype, non_blocking=True, memory_format=layout)
        else:
            with torch.cuda.stream(self._loop_stream):  # unusual kinds cannot be recorded on another stream than theirs
                made = function(*args, **kwargs)
            self._copy_stream.wait_stream(self._loop_stream)
        self.made += [one for one in tree_leaves(made) if isinstance(one, Tensor) and one.is_cuda]
        return made


def timed_event(stream: Any) -> Any:
    """An event of the stream that knows its time, and lets a host that waits for it sleep."""
    return stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))
