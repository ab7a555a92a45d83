"""`prefetch`: batches on the device before the loop asks for them, copied beside its compute.

On the way to the device a batch is packed into pinned memory, copied as one, and cut into its tensors there. Why none
is overwritten while somebody may read it is argued in docs/explanation/prefetch.md. In short: its memory belongs to the
*loop's* stream, so whoever gets that memory next comes after the batch's readers in that stream's order; and before the
copy stream writes, it waits for all that the loop's stream held when the memory was taken.

How much of the copies ran beside the loop's own work is known from events that the device has passed: nothing waits.
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
"""Into so many parts a batch is packed at once, if it has enough bytes for them."""
_TASK_BYTES = 512 << 10
"""So many at least for each: on an H200 a step with 2.7 MB took 0.64 ms by four tasks, and 0.78 by ten. What is less is
packed before a thread is awake."""
_SERIAL_ELEMENTS = 1 << 15
"""So many at once a thread copies by itself. For more PyTorch would start a team of threads beside each of these."""
_WIDE = torch.int64
_REPORTED_SHARE = 0.01
"""Of the time of a step: what is less is noise."""
_SATURATED_SHARE = 0.95
"""Copies that fill this much of the time leave none to hide the rest in."""
_PACKED_MEGABYTES = 1.0
"""Megabytes of a batch below which packing takes the host no longer than a few calls."""

Transform = Callable[[Any], Any]
Position = dict[str, Any]
"""What resumes there: how many batches were delivered, and the loader's own state if it keeps one."""


def prefetch(loader: Any, depth: int = 2, device: Any = None, then: Transform | None = None) -> Prefetch:
    """The loader's batches, on the device, each copied while the loop computes on those before it.

        for batch in keepbusy.prefetch(loader, then=normalise):
            loss = step(batch)

    `loader` is any iterable. Its batches may be tensors, dicts, tuples, named tuples and dataclasses of them,
    trees that PyTorch knows, and objects with a `to`; what else stands in them is left as it is.
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
    chosen = None if device is None else torch.device(device)
    if torch.cuda.is_available() and chosen is not None and chosen.type != "cuda":
        raise ValueError(f"prefetch got device={str(device)!r} but copies to CUDA devices: give device='cuda' or none.")
    return Prefetch(loader, depth, chosen, then)


class Prefetch:
    """A loader whose batches are fetched ahead. What it does not have itself it has from the loader."""

    def __init__(self, loader: Any, depth: int, device: torch.device | None, then: Transform | None) -> None:
        self._loader, self._depth, self._device, self._then = loader, depth, device, then
        self._overlap = Overlap(depth)
        self._copy_streams: dict[torch.device, Any] = {}
        self._cursor = LoaderCursor(loader)
        self._packing: Any = None  # what is iterated in its place on a device
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
        # one stream for all passes: memory that `then` takes from one stream is of no use to another
        if device not in self._copy_streams:
            self._copy_streams[device] = torch.cuda.Stream(device)
        transfer = BatchTransfer(device, self._copy_streams[device], self._depth, self._then)
        return PrefetchIterator(self._cursor, transfer, self._depth, self._overlap)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # asked for while this is not made yet, as by `copy`
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> Position:
        """What resumes at the first batch that the loop has not had, whatever was fetched ahead."""
        return self._cursor.position() if self._resume is None else self._resume

    def load_state_dict(self, state: Position) -> None:
        """The next pass begins there: by the loader's own state if it keeps one, else what came before is skipped."""
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        self._resume = state

    def report(self) -> PrefetchReport:
        """How much of the copies was hidden so far, and why the rest was not."""
        return self._overlap.report()


class LoaderItem(NamedTuple):
    """What the loader gave, or what was made of it since, or the error in its place."""

    batch: Any
    errors: list[Exception]  # at most one; taken out to be raised, so that no frame of its traceback holds it
    position: Position  # that begins with this batch
    duration: int  # nanoseconds that the loader took

    def become(self, made: Callable[[Any], Any]) -> LoaderItem:
        """The same with what is made of the batch."""
        if self.errors:
            return self
        try:
            return self._replace(batch=made(self.batch))
        except Exception as error:
            return self._replace(batch=None, errors=[error])


class LoaderCursor:
    """One pass over a loader. It runs ahead of the loop, so it is told what the loop has not had yet."""

    def __init__(self, loader: Any, resume: Position | None = None) -> None:
        self._loader, self.loop_position = loader, resume
        self._delivered = resume["delivered"] if resume else 0
        self._skip = 0 if resume and "loader" in resume else self._delivered
        self._batches: Iterator[Any] | None = None
        self._end: Position | None = None
        self._ended = False

    def position(self) -> Position:
        """What resumes at the batch that the loop gets next."""
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
            self._end = position  # a loader that was asked once more than the loop may think of its next pass by now
            return None
        self._delivered += 1
        return LoaderItem(batch, errors, position, perf_counter_ns() - began)

    def rewind(self) -> None:
        """The loop had everything: the next pass begins at the beginning."""
        self.close()
        self._delivered, self.loop_position, self._end = 0, None, None

    def close(self) -> None:
        """Let go of the loader's iterator: with it go its workers, and a generator runs its `finally`."""
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
    """Where there is no device."""

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
    """On a device: `depth` batches that the loop has not had yet are there or on their way, and one is being packed."""

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
        entered = _timed_event(stream)
        self._loading = 0
        for _ in range(2):  # twice at most: the lead grows while the loop works
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
        self._overlap.add(Handover(entered, batch.admit(stream), self._loading, packing_time, batch.events))
        return batch.batch

    def close(self) -> None:
        """Let the loader go, and the pinned memory. Batches on their way arrive before their memory is used again."""
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
        """All that the loader gave before is packed or on its way: it may use its own memory again."""
        item = self._cursor.advance()
        if item is None:
            return None
        self._loading += item.duration
        return item.become(self._transfer.pack)


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
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
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
            foreach_copy(self._pieces, sources)

    def wait(self) -> None:
        """Until all is written."""
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
        asked = _timed_event(stream)
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
        return self.send(packed) if any(isinstance(leaf, Tensor) or moves_itself(leaf) for leaf in leaves) else packed

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
            begun = _timed_event(self._copy_stream)
            if layout.packed:
                memory[: layout.packed].copy_(buffer.memory[: layout.packed], non_blocking=True)
            for target, source in zip(targets[layout.together :], alone, strict=True):
                target.copy_(source, non_blocking=True)
            copied = _timed_event(self._copy_stream)
            buffer.read, buffer.sources = copied, alone
            if others or self._then is not None:
                batch, made = self._finish(tree, leaves, others, memory, loop_stream)
                ready = _timed_event(self._copy_stream)
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
            device, dtype, _, layout = parse_to(*args[1:], **kwargs)
            layout = torch.preserve_format if layout is None else layout
            made = args[0].pin_memory().to(device, dtype, non_blocking=True, memory_format=layout)
        else:
            with torch.cuda.stream(self._loop_stream):  # unusual kinds cannot be recorded on another stream than theirs
                made = function(*args, **kwargs)
            self._copy_stream.wait_stream(self._loop_stream)
        self.made += [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_cuda]
        return made


def _timed_event(stream: Any) -> Any:
    """An event of the stream that knows its time, and lets a host that waits for it sleep."""
    return stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))


class CopyEvents(NamedTuple):
    """The copies of a batch: events of their stream, and how many bytes."""

    begun: Any
    copied: Any
    ready: Any  # what follows the copies is done as well
    size: int
    packed: int  # bytes that the host packed first
    pageable: int  # of which these it would not have had to pack, had they been pinned


class Handover(NamedTuple):
    """A batch given to the loop."""

    entered: Any  # an event of the loop's stream: the loop asked for the batch
    asked: Any  # and another: what the loop launches next comes after this
    loading: int  # nanoseconds that the host waited for the loader in between
    packing: int  # and those that it took to pack and to issue copies
    copies: CopyEvents


@dataclass(frozen=True)
class PrefetchReport:
    """What prefetching did so far. Times are nanoseconds of the device, sizes are bytes; `print` it."""

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
        exposed = f"because depth={self.depth} is too shallow for steps so uneven: try depth={2 * self.depth}."
        if self.copies > _SATURATED_SHARE * self.time:
            exposed = "which outlast the work beside them: send fewer bytes, such as uint8 made float by `then`."
        packed = self.packed / self.batches / 1e6
        packing = f"packed {packed:.3g} MB: give the loader workers, which join small tensors (num_workers)."
        if packed < _PACKED_MEGABYTES:
            packing = "has no lead over it: every call counts, also those that issue copies."
        elif 2 * self.pageable > self.packed:
            packing = f"packed {packed:.3g} MB: let the loader pin its memory (pin_memory=True)."
        reasons = (
            (self.exposed, f"copies, {exposed}"),
            (self.packing, f"the host, which {packing}"),
            (self.loader_late, "the loader, which is late: give it more workers."),
        )
        for time, reason in reasons:
            if time > _REPORTED_SHARE * self.time:
                lines.append(f"The GPU waited {time / self.batches / 1e6:.3g} ms a batch for {reason}")
        return "\n".join(lines)


class Overlap:
    """The sums of a report, brought up to what the device has passed."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._sums: Counter[str] = Counter()
        self._pending: deque[Handover] = deque()
        self._previous_asked: Any = None  # when the loop got the batch before

    def add(self, handover: Handover) -> None:
        self._pending.append(handover)
        self._settle()

    def begin(self) -> None:
        """A pass over the loader begins: nothing could hide its first copy, and it is not counted."""
        self._settle()
        self._pending.clear()
        self._previous_asked = None

    def report(self) -> PrefetchReport:
        self._settle()
        return PrefetchReport(self._depth, **self._sums)

    def _settle(self) -> None:
        while self._pending and self._pending[0].asked.query() and self._pending[0].copies.ready.query():
            handover, previous = self._pending.popleft(), self._previous_asked
            self._previous_asked = handover.asked
            if previous is None:
                continue
            idle, exposed = _between(handover.entered, handover.asked), _between(handover.asked, handover.copies.ready)
            if exposed:  # copies of an earlier call came last: a quicker host would have waited for them, too
                idle, exposed = 0, exposed + idle
            packing = min(idle, handover.packing)  # the host packs last: the end of its call is what the GPU waited for
            self._sums.update(
                batches=1,
                time=_between(previous, handover.asked),
                size=handover.copies.size,
                packed=handover.copies.packed,
                pageable=handover.copies.pageable,
                copies=_between(handover.copies.begun, handover.copies.copied),
                exposed=exposed,
                loader_late=min(idle - packing, handover.loading),
                packing=packing,
            )


def _between(first: Any, second: Any) -> int:
    """Nanoseconds from an event to a later one; 0 if it was the earlier one."""
    return max(0, round(first.elapsed_time(second) * 1e6))
