"""Decisions of all ranks, a step late, so that no rank waits for the step that is running."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from keepbusy.runtime.readback import Reading, full_value, readback_stream, refuse_capture, send

T = TypeVar("T")
_END: Any = object()


def agree(flag: Any) -> bool:
    """Whether any rank passed a true flag a call ago: `if keepbusy.agree(stop): break` ends all ranks' loops together.

    Every rank calls it once a step. Each call passes this rank's flag on and returns, the same on every rank, whether
    any rank passed a true flag at the previous call. Being one step late, the answer has had a step's time to arrive,
    and the host waits neither for it nor for the device, but only for ranks that have not begun the previous step. The
    first call returns False. After a True all flags are forgotten, and the next call is a first one again.

    `flag` is true or false (`readings.nonfinite()`, a loader that has ended, a signal that was caught), or a tensor or
    `Reading`, which counts one call later, so that no rank waits for its value. A single process gets its own flag
    back, that of a tensor one call late.

    A rank must not stop calling, or the others wait for it until their process group times out; a rank whose process
    has ended raises an error at once. If data may end earlier on one rank than on others, loop over
    `keepbusy.runtime.together(loader)`.
    """
    ranks = _ranks("agree()")
    return _SINGLE_PROCESS.replace(flag) if ranks is None else ranks.agreed(flag)


def together(batches: Iterable[T]) -> Iterator[T]:
    """The batches of a rank for as long as every rank has one: `for batch in keepbusy.runtime.together(loader)`.

    All ranks get the same number of batches, that of the rank with the fewest. Each fetches one batch ahead and informs
    the others during the batch before, so ranks wait only for the first one. A rank that leaves its loop early, or
    whose data fails, ends it for the others after their current step.
    """
    ranks = _ranks("together()")
    return iter(batches) if ranks is None else _together(iter(batches), ranks.loops)


def gather_later(value: Any) -> Reading:
    """Every rank's value, on every rank, without waiting: a `Reading` of shape (ranks, *value.shape).

    `losses = keepbusy.runtime.gather_later(loss)`, and a step later `losses.tensor.mean()`. All ranks call it
    with the same kind of value; any of them, or none, may read the result. A device tensor is gathered by the process
    group's own collective, beside the compute; a number or a host tensor by gloo.
    """
    if not isinstance(value, Tensor | int | float):
        raise TypeError(f"gather_later() takes a tensor or a number, but was given a {type(value).__name__}.")
    ranks = _ranks("gather_later()")
    tensor = full_value(value).detach() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    if ranks is None:
        return Reading(send([tensor[None]]))
    if tensor.device.type != "cuda" or dist.get_backend() == "gloo":
        return Reading(_HostGather(tensor.cpu(), ranks))
    refuse_capture("gather_later()", "call it after the replay")
    side, own = readback_stream(tensor.device), tensor.clone(memory_format=torch.contiguous_format)
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    own.record_stream(side)  # it may be freed before the collective has read it
    with torch.cuda.stream(side):  # the compute goes on
        every = own.new_empty((dist.get_world_size(), *own.shape))
        dist.all_gather(list(every.unbind()), own, async_op=True).wait()
        return Reading(send([every]))


class _OwnFlag:
    """This process's flag; one on the device counts a call later."""

    def __init__(self) -> None:
        self.pending: Reading | None = None

    def replace(self, flag: Any) -> bool:
        previous, self.pending = self.pending, flag if isinstance(flag, Reading) else None
        if isinstance(flag, Tensor) and flag.device.type != "cpu":
            self.pending = Reading(send([(flag != 0).any()]))
        is_set = previous is not None and bool(previous)
        return is_set or (self.pending is None and bool(flag))


_SINGLE_PROCESS = _OwnFlag()


class _Ranks(_OwnFlag):
    """The ranks' exchange from host to host, by process groups of their own."""

    def __init__(self, world: Any) -> None:
        super().__init__()
        self.world = world
        self.group = dist.new_group(backend="gloo")
        self.loops = dist.new_group(backend="gloo")  # another thread may fetch batches ahead
        self.before: _Answer | None = None

    def agreed(self, flag: Any) -> bool:
        previous, self.before = self.before, _Answer(self.replace(flag), self.group)
        is_agreed = previous is not None and previous.yes()
        if is_agreed:
            self.before = self.pending = None
        return is_agreed


class _Answer:
    """Whether any rank's flag is set, once all ranks have passed theirs."""

    def __init__(self, flag: bool, group: Any) -> None:
        self._flag = torch.tensor([flag], dtype=torch.int32, device="cpu")
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group, async_op=True)

    def yes(self) -> bool:
        _wait(self._work)
        return bool(self._flag.item())


class _HostGather:
    """A value of each rank, from host to host."""

    def __init__(self, own: Tensor, ranks: _Ranks) -> None:
        self._all = own.new_empty((dist.get_world_size(), *own.shape))
        self._work = dist.all_gather(list(self._all.unbind()), own.contiguous(), ranks.group, async_op=True)

    @property
    def ready(self) -> bool:
        return bool(self._work.is_completed())

    def land(self) -> None:
        _wait(self._work)

    def open(self, place: int) -> Tensor:
        self.land()
        return (self._all,)[place]


def _together(source: Iterator[T], group: Any) -> Iterator[T]:
    batch, failure = _next(source)
    answer = _Answer(batch is _END, group)
    while not answer.yes():
        ahead, failure = _next(source)
        answer = _Answer(ahead is _END, group)
        try:
            yield batch
        except GeneratorExit:
            if not answer.yes():
                _Answer(True, group)
            raise
        batch = ahead
    if failure is not None:
        raise failure


def _next(source: Iterator[T]) -> tuple[T, BaseException | None]:
    """The next batch, or `_END` with the error if there is one."""
    try:
        return next(source, _END), None
    except Exception as failure:
        return _END, failure


_OF_WORLD: list[_Ranks] = []


def _ranks(call: str) -> _Ranks | None:
    """The ranks of the current process group; None for a single process."""
    if not dist.is_available() or not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"{call} was called on rank {os.environ.get('RANK', '0')} of {os.environ['WORLD_SIZE']} before there "
                "is a process group; call torch.distributed.init_process_group() first."
            )
        return None
    if dist.get_world_size() == 1:
        return None
    if not _OF_WORLD or _OF_WORLD[0].world is not dist.group.WORLD:
        _OF_WORLD[:] = [_Ranks(dist.group.WORLD)]
    return _OF_WORLD[0]


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            "a rank has ended, or was not heard of for too long, while others waited for what it says; every rank must "
            "come to agree(), gather_later() and together() as often as the others."
        ) from error
