"""Tensors of the device: their memory, the streams that use it, and the graphs that are captured over it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor

from keepbusy.torch_names.dispatcher import storage_size
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.clock.host_thread import HostThread
from keepbusy.virtual.clock.order import Command
from keepbusy.virtual.device_memory import Memory, OutOfMemory
from keepbusy.virtual.memory_blocks import Block
from keepbusy.virtual.memory_views import Extent
from keepbusy.virtual.pytorch.backward_streams import NOT_CHOSEN, ForwardStreams
from keepbusy.virtual.pytorch.recordings import Recording, over_storage
from keepbusy.virtual.pytorch.tensors import VALUES, is_pinned, memory_at, tensors_in, to_device, to_host

Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""The shape, strides and type of a tensor."""


class _DeviceMemory(weakref.ref["Tensor"]):
    """Device memory, given back when the host tensor behind it is freed."""

    __slots__ = ("address", "block", "layout", "return_to_graph")
    address: int
    layout: Layout  # of that host tensor
    block: Block | None  # None while its storage is empty
    return_to_graph: Callable[[], None] | None


class DeviceTensors:
    """Streams, memory and captures of the devices, for kernels and patches."""

    clock: Clock
    memory: Memory
    forward_streams: ForwardStreams
    release_overhead = 0
    """Nanoseconds of real time that our own code takes when a tensor is freed."""

    def __init__(self) -> None:
        self._memory: dict[int, _DeviceMemory] = {}  # by address
        self._shadowed: dict[int, _DeviceMemory] = {}  # by identity; other memory has the same address now
        self.recording: Recording | None = None  # of the current capture, if values are computed

    # streams

    def stream(self, device: int, host: HostThread | None = None) -> int:
        """The current stream of a device, for the calling thread."""
        host = host or self.clock.host()
        chosen = host.chosen_streams.get(device)
        if host.backward_pass is not None:
            chosen = host.backward_pass.stream(device, chosen)
        return self.clock.default_stream(device) if chosen is None else chosen

    def choose_stream(self, device: int, stream: int | None) -> int | None:
        """Make a stream the current one of a device (None: the default stream); returns the previous one."""
        host = self.clock.host()
        before = host.chosen_streams.pop(device, None)
        stream = None if stream == self.clock.default_stream(device) else stream
        if host.backward_pass is not None:
            stream, before = host.backward_pass.choose(device, stream, before)
        elif stream == NOT_CHOSEN:
            stream = None
        self.forward_streams.choose(device, stream)
        if stream is not None:
            host.chosen_streams[device] = stream
        return before

    # uses of memory

    def use(self, read: Iterable[Any], written: Iterable[Any], stream: int, place: int) -> Command:
        """A command is launched that reads and writes these device or pinned tensors."""
        command = self.clock.order.command(stream, place)
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors_in(tensors):
                self.use_tensor(tensor, writes, command)
        return command

    def use_tensor(self, tensor: Tensor, writes: bool, command: Command, is_partial: bool = False) -> None:
        if tensor.layout is not torch.strided or not tensor.is_cuda:
            if is_pinned(tensor) and tensor.numel():
                self.use_pinned(tensor, writes, command)
            return
        begin = tensor.data_ptr()
        memory, offset = self._memory.get(begin), 0
        if memory is None:
            address = tensor.untyped_storage().data_ptr()
            memory, offset = self._memory.get(address), begin - address
        if memory is not None and memory.block is not None and tensor.numel():
            self.memory.accesses.use_block(memory.block, tensor, offset, writes, command, is_partial)

    def use_pinned(self, tensor: Tensor, writes: bool, command: Command) -> None:
        address, extent = tensor.untyped_storage().data_ptr(), Extent.of(tensor, tensor.data_ptr())
        self.memory.accesses.use_pinned(address, memory_at(address), extent, writes, command)

    # memory

    def needs_pinned(self, device: int, is_pinned: bool) -> None:
        """Refuse a copy from or to pageable host memory during a capture."""
        if not is_pinned and self.captures(device):
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
                "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
            )

    def place_on(self, tensor: Tensor, device: int, stream: int | None = None) -> Tensor:
        """A new device tensor, over the host tensor's memory or, during a capture, over the graph's."""
        storage = tensor.untyped_storage()
        size = storage_size(storage)
        recording = None if self.recording is None else self.records(device)
        if recording is not None:
            # the graph keeps the memory alive; the program gets a tensor over it
            tensor = recording.keep(tensor).detach()
            storage = tensor.untyped_storage()
        device_tensor = to_device(tensor, device)
        block = self._block(device, size, self.stream(device) if stream is None else stream)
        if block is not None:
            # only the device's storage keeps the host tensor alive, so both are freed together
            memory = _DeviceMemory(tensor, self._release)
            memory.block, memory.address = block, storage.data_ptr()
            memory.layout = tensor.shape, tensor.stride(), tensor.dtype
            memory.return_to_graph = None if recording is None else partial(recording.arena.give_back, storage)
            previous = self._memory.get(memory.address)
            if previous is not None:
                self._shadowed[id(previous)] = previous
            self._memory[memory.address] = memory
        return device_tensor

    def _block(self, device: int, size: int, stream: int) -> Block | None:
        try:
            return self.memory.allocate(device, size, stream)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def resize(self, storage: Any, size: int) -> None:
        """A storage that is emptied gives its memory back, and gets other memory when it grows again."""
        memory, device = self._memory.get(storage.data_ptr()), storage.device.index
        if memory is not None:
            self.memory.free(memory.block)
            memory.block = self._block(device, size, self.stream(device))

    def seen_by_host(self, tensor: Tensor, layout: Layout) -> Tensor:
        """A host tensor over a device tensor's memory, often the one behind it; it must not be reshaped."""
        memory = self._memory.get(tensor.data_ptr())
        if memory is not None and memory.layout == layout:
            host = memory()
            if host is not None:
                return host
        return to_host(tensor)

    def raise_for_memory(self, error: RuntimeError, device: int) -> None:
        """The host has no memory for a tensor. Raise `MemoryError`, or `OutOfMemoryError` if the device is full."""
        size = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        if size is None:
            return
        self.memory.free(self._block(device, int(size[1]), self.stream(device)))
        raise MemoryError(
            f"keepbusy computes the values of {size[1]} bytes in this machine's memory, and there is not enough of it; "
            "a smaller program fits, or one that runs with --values none."
        ) from None

    def _release(self, memory: _DeviceMemory) -> None:
        if self._memory.get(memory.address) is memory:
            del self._memory[memory.address]
            if VALUES.storages:
                VALUES.storages.discard(memory.address)
        else:
            del self._shadowed[id(memory)]
        if memory.return_to_graph is not None:
            memory.return_to_graph()
        self.memory.free(memory.block)
        host = self.clock.threads.get(get_ident()) if self.release_overhead else None
        if host is not None and not host.pauses:
            host.unwritten_time -= self.release_overhead

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            self.memory.record_stream(memory.block, stream)

    # CUDA graphs

    def captures(self, device: int) -> bool:
        """Whether launches on the device are captured now."""
        return self.clock.capturing(self.stream(device))

    def records(self, device: int) -> Recording | None:
        """The recording of the device's operators, while its current stream captures."""
        return self.recording if self.recording is not None and self.captures(device) else None

    def lasting(self, tensor: Tensor) -> Tensor:
        """Like `to_host`, but only host memory is kept alive: the device may reuse the tensor's memory."""
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        host = None if memory is None else memory()  # None for a tensor of another library
        with torch.inference_mode(False):
            if host is not None:
                storage = host.untyped_storage()
                begin = (tensor.data_ptr() - storage.data_ptr()) // tensor.element_size()
                tensor = over_storage(storage, begin, tensor)
            return to_host(tensor)  # never resized in place, which would move the memory
