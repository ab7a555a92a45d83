"""`readback`: a value of the device that arrives on the host later. Nobody waits for it before somebody needs it."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from keepbusy.runtime.scalar_readback import ScalarReadback
from keepbusy.runtime.tensor_readback import Arriving, HostReadback, TensorReadback

_NUMBERS = (int, float, complex)


def readback(value: Any) -> Any:
    """Read a value of the device without making the host wait: `losses.append(keepbusy.readback(loss))`.

    Returns a `Reading` for a tensor; for dicts, lists, tuples and whatever else PyTorch knows as a pytree the same with
    a `Reading` for each tensor, all of them brought home by one copy. A reading is the value as it is now: what happens
    to the tensor afterwards (an update in place, the next replay of a graph) does not change it.

    `float(reading)` and its like wait only if the value is not there yet, and then for this value alone, not for what
    was launched after it. Read a step later, it is usually there. Tensors of the host are read at once; numbers stay
    as they are. While a CUDA graph is being captured nothing can be read: return the tensor, read it after the replay.
    """
    if isinstance(value, Tensor):
        return Reading(send([whole(value)]))
    leaves, structure = tree_flatten(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places and not all(isinstance(leaf, _NUMBERS) for leaf in leaves):
        kind = f"a {type(value).__name__}" if value is not None else "None"
        raise TypeError(
            f"readback() takes tensors, and dicts, lists and tuples of them, but was given {kind}; "
            "give it the tensors inside."
        )
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for place in places:
        tensor = whole(leaves[place])
        by_device.setdefault(tensor.device, {})[place] = tensor
    for tensors in by_device.values():  # those of one device travel together
        arriving = send(list(tensors.values()))
        for number, place in enumerate(tensors):
            leaves[place] = Reading(arriving, number)
    return tree_unflatten(leaves, structure)


class Reading:
    """A value of the device on its way to the host. It is a number once it is asked for one, not before."""

    __slots__ = ("_place", "_sent")

    def __init__(self, sent: Arriving, place: int = 0) -> None:
        self._sent, self._place = sent, place

    @property
    def ready(self) -> bool:
        """Whether it is there, so that reading it will not wait."""
        return self._sent.ready

    @property
    def tensor(self) -> Tensor:
        """The value as a tensor of the host."""
        return self._sent.open(self._place)

    def item(self) -> Any:
        """The value as a Python number."""
        tensor = self.tensor
        if tensor.numel() != 1:
            raise ValueError(
                f"this reading holds {tensor.numel()} values of shape {tuple(tensor.shape)}, not one number; "
                "take its .tensor, or read back the mean."
            )
        return tensor.item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if specification else str(self)

    def __str__(self) -> str:
        tensor = self.tensor
        return str(tensor.item() if tensor.numel() == 1 else tensor)

    def __repr__(self) -> str:
        return f"Reading({self})" if self.ready else "Reading(on its way)"


_UNDER_WAY: dict[torch.device, deque[Arriving]] = {}
"""Of each device what has not arrived as far as anybody looked, in the order in which it was sent."""
_LOCK = threading.Lock()


def send(tensors: list[Tensor]) -> Arriving:
    """All of one device, on their way."""
    device = tensors[0].device
    if device.type != "cuda":
        return HostReadback(tensors)
    refuse_capture("readback()", "return the tensor from what is captured, and read it back after the replay")
    sent = ScalarReadback.send(tensors, device) or TensorReadback(tensors).send()
    with _LOCK:
        under_way = _UNDER_WAY.get(device)
        if under_way is None:
            under_way = _UNDER_WAY[device] = deque()
        # readings may be kept for long: what has arrived leaves its memory to others. This one is only being sent
        while under_way and under_way[0].ready:
            under_way.popleft().land()
        under_way.append(sent)
    return sent


def whole(tensor: Tensor) -> Tensor:
    """Of a tensor that ranks share the value of the whole: all of them read it, as all of them hold a part."""
    return tensor if tensor.__class__ is Tensor or not hasattr(tensor, "full_tensor") else tensor.full_tensor()


def refuse_capture(who: str, remedy: str) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{who} was called while a CUDA graph is being captured, where nothing can be read; {remedy}."
        )


_Step = dict[str, Reading | float]


class Readings:
    """Means and checks of many values, for one copy a step and without making the host wait for the step it is in.

        readings = Readings()
        for step, batch in enumerate(loader):
            ...
            readings.add(loss=loss, accuracy=accuracy, rate=schedule.get_last_lr()[0])
            if readings.nonfinite():
                break
            if step % 100 == 0:
                print(readings.means())
        print(readings.means(last=True))

    Every answer is one step late: it is about all steps but the last one added, so that the device still has that one
    to do while the host reads. It does not depend on how fast anything ran. `last=True` counts the last step too, and
    waits for it: that is for the end of an epoch. Sums are kept in double precision.
    """

    def __init__(self) -> None:
        self._uncounted: deque[_Step] = deque()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._nonfinite: dict[str, None] = {}

    def add(self, **values: Any) -> None:
        """A step's values by name: tensors with one element, on any device, or numbers. Steps may differ in names."""
        for name, value in values.items():
            _check(name, value)
        self._uncounted.append(readback(values))
        while len(self._uncounted) > 1 and _is_ready(self._uncounted[0]):
            self._count(self._uncounted.popleft())

    def means(self, *, last: bool = False) -> dict[str, float]:
        """Of each name the mean since the last `reset()`."""
        self._read(last)
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def nonfinite(self, *, last: bool = False) -> list[str]:
        """The names that were infinite or not a number since the last `reset()`: a check that does not stall."""
        self._read(last)
        return list(self._nonfinite)

    def reset(self) -> None:
        """Begin anew. What has not been counted yet, the step added last, belongs to the new beginning."""
        self._read(last=False)
        self._sums, self._counts, self._nonfinite = {}, {}, {}

    def _read(self, last: bool) -> None:
        while len(self._uncounted) > (0 if last else 1):
            self._count(self._uncounted.popleft())

    def _count(self, step: _Step) -> None:
        for name, reading in step.items():
            value = float(reading)
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
            if not math.isfinite(value):
                self._nonfinite[name] = None


def _check(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return
        found = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, Reading | int | float):
        return
    else:
        found = f"a {type(value).__name__}"
    raise ValueError(
        f"add({name}=...) was given {found}, and a mean is kept of single numbers; give {name}'s own mean."
    )


def _is_ready(step: _Step) -> bool:
    return all(reading.ready for reading in step.values() if isinstance(reading, Reading))
