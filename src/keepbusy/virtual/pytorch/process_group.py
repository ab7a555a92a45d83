"""`torch.distributed` on virtual GPUs: `nccl` is there, `gloo` takes tensors of the GPU, and both are virtual."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keepbusy.timeline.model import Direction
from keepbusy.torch_names.dispatcher import ENGINE, current_node
from keepbusy.torch_names.distributed import GROUPS, LOG_OF_DDP, Work
from keepbusy.virtual.clock.captures import Moment
from keepbusy.virtual.costs import figures
from keepbusy.virtual.costs.device import crossings
from keepbusy.virtual.cpp_hooks import hide_native_timer
from keepbusy.virtual.machine import CURRENT, MACHINE, DeviceCall
from keepbusy.virtual.pytorch import NAMES
from keepbusy.virtual.pytorch.cuda_api import replace_everywhere
from keepbusy.virtual.pytorch.tensors import CARRIED_SIZE, VALUES, map_tensors, tensors_in, to_host

# Moving the values of a collective: at once, or at the replay of a graph.


def exchange(move: Callable[..., Any], tensors: list[Any]) -> None:
    """Move values between ranks, and wait for that."""
    work = move(*tensors)
    if work is not None:
        work.wait()


def _at_replay(transfer: Callable[..., Any], tensors: list[Any], meet: Callable[[int], int]) -> Callable[[int], int]:
    """A captured collective moves its values at each replay, before the ranks agree on the last arrival."""
    lasting = map_tensors(lambda tensor: MACHINE.lasting(tensor.detach()), tensors)
    move: Callable[[], object] = partial(exchange, transfer, lasting)
    if MACHINE.recording is not None:
        move = MACHINE.recording.after_steps_so_far(move)
    return lambda arrival: (move(), meet(arrival))[1]


# The handle of a collective that is not finished.


def _hold_up(device: int, moment: Moment | None, blocks: bool) -> None:
    """The current stream of the device waits for the moment; `blocks`: the host waits for it, too."""
    if moment is None:
        return
    if blocks:
        with DeviceCall("gloo:wait"):
            MACHINE.clock.sync_moment(moment)
    MACHINE.clock.wait(MACHINE.stream(device), moment)


class Handle(Work):
    """A collective that is running. Waiting for NCCL makes the current stream wait; waiting for gloo, the host."""

    def __init__(self, result: Any, device: int = -1, moment: Moment | None = None, blocks: bool = False) -> None:
        super().__init__()
        self.moment = moment
        self._hold_up = partial(_hold_up, device, moment, blocks)  # holds neither this object nor the result
        self.future = _Future(self._hold_up)
        self.future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        self._hold_up()
        return True

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        return self.moment is None or MACHINE.clock.query(self.moment)

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        """A future, for which C++ waits at the end of the backward pass without a call of ours, so a callback is queued
        before that. At the end of the pass itself nothing can be queued any more."""
        if current_node() is None:
            self._hold_up()
        with contextlib.suppress(RuntimeError):  # outside of a backward pass the caller waits itself
            ENGINE.queue_callback(self._hold_up)
        return self.future


class _Future(torch.futures.Future[Any]):  # type: ignore[misc]  # PyTorch is not typed here
    """The future of a collective, for waits in Python."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self) -> Any:
        self._wait()
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> Any:
        self._wait()
        return super().then(callback)


# The process group behind `nccl` and `gloo`: real values through gloo on the host, modelled time on the devices.
#
# Ranks meet in virtual time: each sends when its part could begin, and all receive when the last one could.

GLOO = figures("gloo")
_TIME_TAG, _KNOWN_TAG = 1 << 20, 1 << 21
"""Added to a message's tag, for messages with its time, and with whether it has values."""


class VirtualGroup(dist.ProcessGroup):  # type: ignore[misc]  # PyTorch is not typed here
    """A group of ranks. PyTorch prescribes the names of the methods."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, backend: str = "nccl") -> None:
        """`backend`: `nccl`, or `gloo`, which copies device tensors to the host and back; host tensors are left to
        gloo."""
        super().__init__(rank, size)
        self.backend, self._by_host = backend, backend == "gloo"
        self.gloo: Any = OneForAll(size) if MACHINE.alike > 1 else dist.ProcessGroupGloo(store, rank, size, timeout)
        self.index, self.members = rank, size
        if MACHINE.rank is None:  # the first group has all ranks
            MACHINE.rank = rank
            MACHINE.clock.await_others("init_process_group", self._last_arrival)
        self._streams: dict[tuple[int, int], int] = {}

    @cached_property
    def _hosts(self) -> int:
        """The number of hosts of its ranks."""
        ranks, per_host = GROUPS.pg_group_ranks.get(self), MACHINE.device.wire.devices
        return len({rank // per_host for rank in ranks}) if ranks else -(-self.members // per_host)

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        # DDP's logger asks a backend named gloo for native gloo
        return OUR_BACKENDS["gloo"] if self._by_host else self.backend

    def _get_backend(self, _device: Any) -> VirtualGroup:
        """Called by `batch_isend_irecv` since PyTorch 2.15, to find out whether messages can be coalesced."""
        return self

    @property
    def pg_name(self) -> str:
        return str(GROUPS.pg_names[self])

    group_name = pg_name

    def _number(self, peer: int) -> int:
        """A number that is the same on all ranks that meet: those of the group, or a sender and its receiver."""
        pair = f"|{min(self.index, peer)}-{max(self.index, peer)}" if peer >= 0 else ""
        return zlib.crc32(f"{self.pg_name}{pair}".encode()) & 0x7FFFFFFF

    def _stream(self, device: int, peer: int = -1) -> int:
        """The stream of collectives or, as in NCCL, of messages with one peer."""
        if (device, peer) not in self._streams:
            self._streams[device, peer] = MACHINE.clock.new_stream(device)
            MACHINE.memory.accesses.private_streams.add(self._streams[device, peer])
        return self._streams[device, peer]

    def _stays_on_host(self, tensors: list[Tensor]) -> bool:
        return self._by_host and not any(tensor.is_cuda for tensor in tensors)

    # parts of all collectives

    def _run(
        self, name: str, result: Any, tensors: list[Any], move: Callable[..., Any],
        meet: Callable[[int], int] | None = None, sends: bool = True, peer: int = -1,
        agree: Callable[[int], int] | None = None, writes: bool = True,
    ) -> Handle:  # fmt: skip
        """`move` moves the values of the tensors on the host. `sends`: whether this rank sends values. `peer`: the
        other rank of a message. `meet` and `agree` find the last arrival, and whether all have values."""
        flat = tensors_in(tensors)
        if self._stays_on_host(flat):
            return move(*tensors) or Handle(result)
        with DeviceCall(f"{self.backend}:{name}") as place:
            device = next((tensor.get_device() for tensor in flat if tensor.is_cuda), -1)
            read, written = tensors[-1] if sends else [], tensors[0] if writes else []
            meet = meet or self._last_arrival
            has_values = VALUES.real or device < 0
            if not has_values and _bytes(flat) <= CARRIED_SIZE:  # small tensors may have some
                agree = agree or partial(self._agreed, operation=dist.ReduceOp.MIN)
                has_values = bool(agree(all(map(VALUES.readable, tensors_in(read)))))
            if not has_values:
                map_tensors(VALUES.forget, tensors[0])
            elif device >= 0 and MACHINE.captures(device):
                meet = _at_replay(move, tensors, meet)
            else:
                exchange(move, map_tensors(_on_host, tensors))
                map_tensors(VALUES.keep, tensors[0])
            if device < 0:
                return Handle(result)
            size = max(map(_bytes, tensors), default=0)
            use = partial(MACHINE.use, read, written, place=place)
            moment = self._on_clock(name, device, size, meet, peer, use)
            return Handle(result, device, moment, self._by_host)

    def _on_clock(
        self, name: str, device: int, size: int, meet: Callable[[int], int], peer: int, use: Callable[..., object]
    ) -> Moment:
        """Time the collective. `use`: notes on a stream what it reads and writes."""
        clock, stream = MACHINE.clock, self._stream(device, peer)
        clock.wait(stream, clock.record(MACHINE.stream(device)))
        use(stream=stream)
        number, members = self._number(peer), 2 if peer >= 0 else self.members
        if self._by_host:
            clock.copy(stream, Direction.DEVICE_TO_HOST, size, pinned=True, non_blocking=True)
            wire = GLOO.latency + round(size * crossings(name, self.members) / GLOO.bandwidth)
            clock.collective(stream, f"gloo:{name}", wire, size, number, members, meet)
            clock.copy(stream, Direction.HOST_TO_DEVICE, size, pinned=True, non_blocking=True)
        else:
            wire = MACHINE.device.wire.collective(name, size, self.members, self._hosts)
            kernel = f"ncclDevKernel_{NAMES['collective_kernels'][name]}"
            clock.collective(stream, kernel, wire, size, number, members, meet)
        return clock.record(stream)

    def _last_arrival(self, arrival: int) -> int:
        return self._agreed(arrival, dist.ReduceOp.MAX)

    def _agreed(self, value: int, operation: Any) -> int:
        number = _number(value)
        self.gloo.allreduce([number], _reducing(operation)).wait()
        return int(number.item())

    # the collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        if self._stays_on_host(tensors):
            return self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())
        return self._run("all_reduce", tensors, [tensors], lambda on_host: self._reduced(on_host, opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        if self._stays_on_host(tensors):
            return self.gloo.allreduce_coalesced(tensors, opts or dist.AllreduceCoalescedOptions())
        if self._by_host:
            raise RuntimeError("ProcessGroupGloo::allreduce_coalesced: unsupported device type cuda")
        return [self.allreduce([tensor], opts) for tensor in tensors][-1]

    def _reduced(self, tensors: list[Tensor], options: Any) -> None:
        """All-reduce by gloo, which has no average: that is a sum, divided."""
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        average = operation == dist.ReduceOp.AVG
        self.gloo.allreduce(tensors, _reducing(dist.ReduceOp.SUM if average else operation)).wait()
        for tensor in tensors if average else ():
            tensor.div_(self.members)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        return self._as_gloo("broadcast", opts or dist.BroadcastOptions(), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        return self._as_gloo("reduce", opts or dist.ReduceOptions(), tensors)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        return self._as_gloo("gather", opts or dist.GatherOptions(), outputs, inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        return self._as_gloo("scatter", opts or dist.ScatterOptions(), outputs, inputs)

    def _as_gloo(self, name: str, options: Any, *tensors: Any) -> Handle:
        collective, is_root = getattr(self.gloo, name), options.rootRank == self.index
        sends = name != "broadcast" or is_root
        writes = {"broadcast": not is_root, "reduce": is_root, "gather": is_root}.get(name, True)
        return self._run(
            name, tensors[0], [*tensors], lambda *on_host: collective(*on_host, options), sends=sends, writes=writes
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        return self._run("all_gather", outputs, [outputs, inputs], self.gloo.allgather)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Handle:
        def gather(out: Tensor, own: Tensor) -> Any:
            return self.gloo.allgather([list(out.view(-1).chunk(self.members))], [own.contiguous().view(-1)])

        return self._run("all_gather", [output], [output, source], gather)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        return list(map(self.all_gather_single, outputs, inputs))[-1]

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        def scatter(out: Any, parts: Any) -> None:
            stacked = torch.stack([part.contiguous() for part in parts[0]])
            self._reduced([stacked], opts)
            out[0].copy_(stacked[self.index].view(out[0].shape))

        return self._run("reduce_scatter", outputs, [outputs, inputs], scatter)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Handle:
        return self.reduce_scatter([output], [list(source.view(self.members, -1).unbind())], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        return [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, source: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Handle:
        sizes = out_sizes or [], in_sizes or []
        return self._run(
            "all_to_all", [output], [output, source],
            lambda out, own: self.gloo.alltoall_base(out, own, *sizes, dist.AllToAllOptions()),
        )  # fmt: skip

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        if self._by_host:
            raise RuntimeError("Backend gloo does not support alltoall")

        def exchange(out: list[Tensor], own: list[Tensor]) -> None:
            flat = torch.cat([tensor.reshape(-1) for tensor in own])
            received = flat.new_empty(sum(tensor.numel() for tensor in out))
            sizes = [[tensor.numel() for tensor in side] for side in (out, own)]
            self.gloo.alltoall_base(received, flat, *sizes, dist.AllToAllOptions()).wait()
            for target, part in zip(out, received.split(sizes[0]), strict=True):
                target.copy_(part.view(target.shape))

        return self._run("all_to_all", outputs, [outputs, inputs], exchange)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Handle:
        """Send without waiting for the peer. The time and whether there are values are sent, too."""
        if self._stays_on_host(tensors):
            return self.gloo.send(tensors, peer, tag)
        self._refuse_messages()

        def post(on_host: list[Tensor]) -> None:
            for message in on_host:
                self._post(message.clone(), peer, tag)

        def post_value(value: int, offset: int) -> int:
            self._post(_number(value), peer, tag + offset)
            return value

        meet, agree = partial(post_value, offset=_TIME_TAG), partial(post_value, offset=_KNOWN_TAG)
        return self._run("send", tensors, [tensors], post, meet, peer=peer, agree=agree, writes=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        if not self._stays_on_host(tensors):
            self._refuse_messages()
        return self.gloo.recv_anysource(tensors, tag)

    def _refuse_messages(self) -> None:
        """Refuse device tensors, as gloo does: it gives the device's address to the network, which fails."""
        if self._by_host:
            raise RuntimeError(
                "writev: Bad address (gloo sends no tensors of a GPU; send a copy on the CPU, or use nccl)"
            )

    def _post(self, message: Tensor, peer: int, tag: int) -> None:
        """Send without waiting: gloo finishes once the message is received, which two ranks must not both await."""
        _posted[:] = [posted for posted in _posted if not posted[0].is_completed()]
        _posted.append((self.gloo.send([message], peer, tag), message))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Handle:
        """Receive; the device waits for the sender."""
        if self._stays_on_host(tensors):
            return self.gloo.recv(tensors, peer, tag)
        self._refuse_messages()

        def receive_value(_value: int, offset: int) -> int:
            received = _number(0)
            self.gloo.recv([received], peer, tag + offset).wait()
            return int(received.item())

        meet, agree = partial(receive_value, offset=_TIME_TAG), partial(receive_value, offset=_KNOWN_TAG)
        return self._run(
            "recv", tensors, [tensors], lambda on_host: self.gloo.recv(on_host, peer, tag), meet, sends=False,
            peer=peer, agree=agree,
        )  # fmt: skip

    def _start_coalescing(self, device: Any) -> None:
        """Coalesced operations run one by one here; the values are the same."""

    def _end_coalescing(self, device: Any) -> Handle:
        index, clock = CURRENT.index(device), MACHINE.clock
        own = self._stream(index)
        for (device_index, peer), stream in [*self._streams.items()]:
            if device_index == index and peer >= 0:
                clock.wait(own, clock.record(stream))
        return Handle([], index, clock.record(own))

    def barrier(self, opts: Any = None) -> Handle:
        """A small all-reduce for which the host waits; in gloo only the hosts wait."""
        if self._by_host:
            MACHINE.clock.await_others("gloo:barrier", self._last_arrival)
            return Handle([])
        token = torch.ones(1, device=torch.device("cuda", CURRENT.device))
        self.allreduce([token]).wait()
        with DeviceCall("nccl:barrier"):
            MACHINE.clock.sync_stream(MACHINE.stream(CURRENT.device))
        return Handle([])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.gloo.monitored_barrier(*() if timeout is None else (timeout,), wait_all_ranks=wait_all_ranks)


_posted: list[tuple[Any, Tensor]] = []
"""Messages of this process that their receivers may not have received."""
PATIENCE = 10.0
"""Seconds that a rank waits for them at its end; on a GPU it would wait for ever."""


def _see_messages_off() -> None:
    """A rank ends once its messages are received; if it has failed, at once."""
    until = monotonic() + (0.0 if hasattr(sys, "last_value") else PATIENCE)
    while _posted and (remaining := until - monotonic()) > 0:
        work, _ = _posted.pop()
        with contextlib.suppress(RuntimeError):  # the receiver has ended
            work.wait(timedelta(seconds=remaining))


class OneForAll:
    """In place of gloo if one process stands for all ranks: the others' values are those of this one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def wait(self) -> bool:
        return True

    def allreduce(self, tensors: list[Tensor], options: Any) -> OneForAll:
        for tensor in tensors:
            if options.reduceOp == dist.ReduceOp.SUM:
                tensor.mul_(self.size)
            elif options.reduceOp == dist.ReduceOp.PRODUCT:
                tensor.pow_(self.size)
        return self

    reduce = allreduce_coalesced = allreduce

    def broadcast(self, _tensors: list[Tensor], _options: Any) -> OneForAll:
        return self

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> OneForAll:
        for targets, own in zip(outputs, inputs, strict=True):
            for target in targets:
                target.copy_(own)
        return self

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _options: Any) -> OneForAll:
        return self.allgather(outputs, inputs) if outputs else self

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], _options: Any) -> OneForAll:
        for target, parts in zip(outputs, inputs, strict=False):
            target.copy_(parts[0])
        return self

    def alltoall_base(self, output: Tensor, source: Tensor, *_sizes: Any) -> OneForAll:
        if output.numel() != source.numel():
            raise self._not_alike("exchange parts of different sizes")
        output.copy_(source.view(output.shape))
        return self

    def send(self, *_message: Any) -> OneForAll:
        raise self._not_alike("send to one another")

    recv = send

    def _not_alike(self, act: str) -> RuntimeError:
        return RuntimeError(f"ranks that {act} do different things; run them all: keepbusy run --ranks {self.size}")


def _on_host(tensor: Tensor) -> Tensor:
    return to_host(tensor.detach()) if tensor.is_cuda else tensor.detach()


def _number(value: int) -> Tensor:
    return torch.ops.aten.scalar_tensor.default(value, dtype=torch.int64)


def _reducing(operation: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    return options


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


OUR_BACKENDS = {"nccl": "keepbusy", "gloo": "keepbusy_gloo"}
"""The program's names of backends, and the names under which ours are registered."""


def patch() -> None:
    for backend, name in OUR_BACKENDS.items():
        dist.Backend.register_backend(name, partial(VirtualGroup, backend=backend), devices=["cuda", "cpu"])
    native = dist.distributed_c10d
    wrappers: dict[str, Callable[..., Any]] = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "destroy_process_group": _destroy_process_group,
        "get_backend": _get_backend,
        **dict.fromkeys(("broadcast_object_list", "send_object_list", "recv_object_list"), _objects_by_host),
    }
    wrapped: dict[str, Any] = {name: partial(wrapper, getattr(native, name)) for name, wrapper in wrappers.items()}
    replace_everywhere(native, {**wrapped, "is_nccl_available": lambda: True})
    atexit.register(_see_messages_off)
    os.register_at_fork(after_in_child=_posted.clear)
    # DDP's logger reads native CUDA timers
    setattr(*LOG_OF_DDP, lambda _self: None)
    hide_native_timer()


def _our_backend(backend: Any) -> Any:
    """Our backend, if the program's one for device tensors is `nccl` or `gloo`; else the program's."""
    named = dict.fromkeys(("cuda", "cpu"), str(backend).lower()) if backend is not None else {"cuda": "nccl"}
    if ":" in named.get("cpu", ""):
        named = dict(part.split(":", 1) for part in named["cpu"].split(","))
    return OUR_BACKENDS.get(named.get("cuda", ""), backend)


def _init_process_group(native: Callable[..., Any], backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_id", None)  # else native NCCL would be started early
    if MACHINE.alike > 1:
        kwargs |= {"rank": 0, "world_size": MACHINE.alike, "store": dist.HashStore(), "init_method": None}
    return native(_our_backend(backend), *args, **kwargs)


def _new_group(
    native: Callable[..., Any], ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
) -> Any:
    kwargs.pop("device_id", None)
    return native(ranks, timeout, backend if backend is None else _our_backend(backend), *args, **kwargs)


def _destroy_process_group(native: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _see_messages_off()
    native(*args, **kwargs)


def _get_backend(native: Callable[..., Any], group: Any = None) -> Any:
    own_name = native(group)
    return next((backend for backend, name in OUR_BACKENDS.items() if name == own_name), own_name)


def _objects_by_host(native: Callable[..., Any], *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Send objects as host tensors in a run without values, where device tensors would lose them."""
    return native(*args, device=device if VALUES.real else torch.device("cpu"), **kwargs)
