"""The first replays, compared with an eager call from the same state.

State is saved, the graph replayed, what came of it kept, the state put back, and the step run eagerly: that is the
call, and its Python runs once. Both must leave the same bits, or sums that were added up in another order: PyTorch's
autograd changes that from one step to the next where a backward pass has a graph of its own, and atomic additions do so
each time. A few roundings of a tensor's largest number are such a difference. Where there is more, the graph is
replayed again from that state, and then from weights that are moved by one rounding each; the eager call may be further
from the first replay than those replays are by a small factor. A replay runs no Python, so what the host decided anew
differs by more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.graph.captured_call import CapturedCall, StepCall, sync_mode
from keepbusy.runtime.graph.host_state import HostState, changes_between
from keepbusy.runtime.graph.names_read import is_a
from keepbusy.runtime.graph.participants import Participants
from keepbusy.runtime.graph.reachable import bytes_of, content_sum, has_memory, writes_to
from keepbusy.runtime.later_backward import Gradients, LaterBackward, OneOperation, gradients_of
from keepbusy.runtime.tensor_kinds import flatten_result
from keepbusy.torch_names.pytorch import foreach_copy, tree_leaves, tree_unflatten

COMPARED_FIRST = 3
"""So many replays of a graph are compared with an eager call, and from then on each whose number is a power of two."""
AS_FAR = 8
"""Where sums come out differently each time, two of them may be this much further apart than two others, and so many
roundings."""
SAVED_ALWAYS = 1 << 16
"""Bytes of a tensor that is saved for each comparison, whether it was seen to change or not: PyTorch does not count
every write, and a counter such as GradScaler's may keep its value at first."""
_NUDGED_REPLAYS = 2
"""With other weights by one rounding."""
_MOST_REPLAYS = 8
"""To learn how far replays are apart. Few numbers, as a single loss, may come out the same twice by chance."""


def is_compared(replay: int) -> bool:
    return replay <= COMPARED_FIRST or not replay & (replay - 1)


class WrittenTensors:
    """Which tensors of the device a step writes to: what an optimizer holds, and others that were seen to change."""

    def __init__(self, participants: Participants, host: HostState) -> None:
        self._participants, self._host = participants, host
        self._written: dict[int, Tensor] = {}

    @contextmanager
    def watching(self, is_captured: bool = False) -> Iterator[None]:
        """While the step runs. In a capture nothing changes yet, but PyTorch counts what is to be written."""
        saved = self._saved_anyway()
        tensors = [
            (label, reached)
            for label, reached in self._device_tensors()
            if id(reached) not in saved and not is_small(reached)
        ]
        before = [writes_to(tensor) for _, tensor in tensors]
        sums = [] if is_captured else _sums(tensors)
        yield
        after = [] if is_captured else _sums(tensors)
        for place, (_, tensor) in enumerate(tensors):
            if writes_to(tensor) != before[place] or (sums and sums[place] != after[place]):
                self._written[id(tensor)] = tensor

    def stands_for(self, other: Tensor, tensor: Tensor) -> None:
        """The step finds this one where it found the other one."""
        if self._written.pop(id(other), None) is not None:
            self._written[id(tensor)] = tensor

    def leaves(self) -> list[Tensor]:
        """Those that gather gradients."""
        return self._participants.gathering()

    def split(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """Those that it writes to, and the others; and what a person calls them."""
        known, tensors = self._saved_anyway(), self._device_tensors()
        known |= {id(tensor): tensor for _, tensor in tensors if is_small(tensor)}
        labels = {id(tensor): label for label, tensor in tensors}
        named = [(labels.get(key, "a tensor of an optimizer"), tensor) for key, tensor in known.items()]
        others = [(label, tensor) for label, tensor in tensors if id(tensor) not in known]
        return [(label, tensor) for label, tensor in named if _lies_on_device(tensor)], others

    def _saved_anyway(self) -> dict[int, Tensor]:
        known = {id(tensor): tensor for tensor in (*self.leaves(), *self._written.values())}
        for optimizer in self._participants.optimizers:
            stepped = [group["params"] for group in optimizer.param_groups]
            known |= {id(tensor): tensor for tensor in tree_leaves([*optimizer.state.values(), stepped])}
        return known

    def _device_tensors(self) -> list[tuple[str, Tensor]]:
        return [(label, value) for label, value in self._host.reached() if _lies_on_device(value)]


def is_small(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= SAVED_ALWAYS


def _lies_on_device(value: Any) -> bool:
    return is_a(value, Tensor) and bool(value.is_cuda) and has_memory(value)


def _sums(tensors: list[tuple[str, Tensor]]) -> list[int]:
    sums = [content_sum(tensor.untyped_storage()).to("cuda") for _, tensor in tensors]
    with sync_mode("default"):
        return torch.stack(sums).tolist() if sums else []


class SavedTensors:
    """What the memory of tensors holds now: in memory of the device, or of the host where there is too little."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._held = [bytes_of(storage) for storage in storages.values()]
        try:
            copies = [torch.empty_like(held) for held in self._held]
        except torch.OutOfMemoryError:
            copies = [*map(_copy, self._held)]
        else:
            _copy_all(copies, self._held)
        self._copies = dict(zip(storages, copies, strict=True))

    def restore(self) -> None:
        _copy_all(self._held, [*self._copies.values()])

    def saved(self, tensor: Tensor) -> Tensor:
        """The tensor as it was."""
        copy = self._copies[tensor.untyped_storage()._cdata]
        empty = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        return empty.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """With few launches."""
    if targets:
        foreach_copy(targets, sources)


def _copy(data: Tensor) -> Tensor:
    try:
        return data.clone()
    except torch.OutOfMemoryError:
        return data.cpu()


class StepState:
    """All that a step may change on the device, as it is now."""

    def __init__(self, tensors: list[Tensor], leaves: list[Tensor]) -> None:
        self._gradients = [(leaf, leaf.grad) for leaf in leaves]
        self._saved = SavedTensors([*tensors, *[grad for _, grad in self._gradients if grad is not None]])
        self._random = torch.cuda.get_rng_state()

    def restore(self) -> None:
        self._saved.restore()
        for leaf, gradient in self._gradients:
            leaf.grad = gradient
        torch.cuda.set_rng_state(self._random)


class NamedResults:
    """Values by what a person calls them."""

    def __init__(self, named: list[tuple[str, Any]]) -> None:
        self.named = named


class Outcome(NamedResults):
    """What a call made: results, tensors that it writes to, gradients and random numbers."""

    def __init__(self, returned: Any, tensors: list[tuple[str, Tensor]], leaves: list[Tensor], is_kept: bool) -> None:
        results, self.spec = flatten_result(returned)
        labels = {id(tensor): label for label, tensor in tensors}
        named = [(f"result {place}", result) for place, result in enumerate(results)]
        named += [(f"`{label}`", tensor) for label, tensor in tensors]
        named += [(f"the gradient of `{labels.get(id(leaf), 'a weight')}`", leaf.grad) for leaf in leaves]
        if is_kept:
            saved = SavedTensors([value for _, value in named if isinstance(value, Tensor)])
            named = [(label, saved.saved(value) if isinstance(value, Tensor) else value) for label, value in named]
        named.append(("the state of random numbers", torch.cuda.get_rng_state()))
        self.named = named


def replay_compared(
    captured: CapturedCall, call: StepCall, run: Callable[[StepCall], Any], written: WrittenTensors, host: HostState
) -> tuple[Any, str]:
    """What the eager call returned, and why no replay may stand in for it, if so. State is left as by that call."""
    mode = torch.cuda.get_sync_debug_mode()

    def run_as_asked() -> Any:
        with sync_mode(mode):
            return run(call)

    with sync_mode("default"):
        return _compared(captured, call, run_as_asked, written, host)


def _compared(
    captured: CapturedCall, call: StepCall, run: Callable[[], Any], written: WrittenTensors, host: HostState
) -> tuple[Any, str]:
    tensors, others = written.split()
    tensors += [("an argument", tensor) for tensor in captured.written_to(call.tensors)]
    held, leaves = [tensor for _, tensor in tensors], written.leaves()
    before = StepState(held, leaves)
    try:
        replayed = Outcome(captured.replay(call.tensors), tensors, leaves, is_kept=True)
    finally:
        before.restore()
    writes, on_host = [writes_to(tensor) for _, tensor in others], host.read()
    try:
        returned = run()
    except torch.OutOfMemoryError:
        before.restore()
        raise
    if changes := changes_between(on_host, host.read()):
        return returned, f"it {changes[0].why}"
    for (label, tensor), count in zip(others, writes, strict=True):
        if writes_to(tensor) != count:
            return returned, f"it writes to `{label}` at some calls only"
    made = Outcome(returned, tensors, leaves, is_kept=False)
    if replayed.spec != made.spec:
        return returned, "what it returns is not always built alike"

    def again(nudged_by: int | None = None) -> Outcome:
        before.restore()
        if nudged_by is not None:
            _nudge(leaves, nudged_by)
        return Outcome(captured.replay(call.tensors), tensors, leaves, is_kept=False)

    if _places_that_differ(made, replayed):
        after, made = StepState(held, leaves), Outcome(returned, tensors, leaves, is_kept=True)
        nudged: list[Callable[[], Outcome]] = [functools.partial(again, parity) for parity in range(_NUDGED_REPLAYS)]
        finding = difference(made, replayed, [*[again] * _MOST_REPLAYS, *nudged])
        after.restore()
    else:
        finding = ""
    if not finding:
        captured.take_gradients()
    return returned, finding


def gradients_compared(
    later: LaterBackward, returned: Any, apart: StepCall, tensors: list[Tensor], labels: dict[int, str]
) -> Any:
    """What an eager call returned, whose backward pass is compared with a replay from the same gradients of results.
    `apart`: that call; `tensors`: those of the program, of which its own are made."""
    leaves, spec = flatten_result(returned)
    outputs, own = later.outputs_of_leaves(leaves), later.sources(apart.tensors)
    call, sources = later.replayed(lambda: (outputs, own)), later.sources(tensors)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]

    def named(gradients: Gradients) -> NamedResults:
        known = [f"`{labels[id(source)]}`" if id(source) in labels else "an argument or a weight" for source in sources]
        return NamedResults(
            [(f"the gradient of {label}", gradient) for label, gradient in zip(known, gradients, strict=True)]
        )

    def go_back(given: Gradients) -> Gradients:
        if torch.is_grad_enabled() or not later.is_last(call):
            return call.go_back(given)
        before = generator.get_state()
        made = gradients_of(outputs, own, given)
        after = generator.get_state()

        def replay() -> NamedResults:
            generator.set_state(before)
            return named(later.replay(given))

        with sync_mode("default"):
            later.note(difference(named(made), replay(), [replay] * _MOST_REPLAYS))
        generator.set_state(after)
        call.is_over = True
        return made

    results = OneOperation.apply(lambda: ([output.detach() for output in outputs], go_back), *sources)
    for place, result in zip(later.places, results, strict=True):
        leaves[place] = result
    return tree_unflatten(leaves, spec)


def difference(made: NamedResults, replayed: NamedResults, replays: Iterable[Callable[[], NamedResults]]) -> str:
    """Why what was replayed cannot stand in for what an eager call made; "" where they are the same, or as far apart
    as these further replays are from the first."""
    differing, spread = _places_that_differ(made, replayed), dict[int, float]()
    for replay_again in replays:
        if not differing:
            return ""
        other = replay_again()
        differing = [place for place in differing if not _varies(place, replayed, made, other, spread)]
    if not differing:
        return ""
    (label, value), (_, other_value) = made.named[differing[0]], replayed.named[differing[0]]
    distance = _distance(value, other_value)
    distance_text = "" if distance == float("inf") else f" by up to {distance:.2g}"
    return (
        f"a replay and an eager call from the same state differ in {label}{distance_text}, "
        "so the step depends on something that no replay renews"
    )


def _nudge(leaves: list[Tensor], parity: int) -> None:
    """Move numbers by one rounding, every second one up and the others down. What comes of them is rounded differently
    throughout, as by another order of sums. In sixteen bits a rounding is too much."""
    with torch.no_grad():
        for leaf in leaves:
            if leaf.is_floating_point() and leaf.dtype.itemsize >= 4:
                places = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape)
                leaf.copy_(torch.nextafter(leaf, torch.where((places + parity) % 2 == 0, torch.inf, -torch.inf)))


def _places_that_differ(made: NamedResults, replayed: NamedResults) -> list[int]:
    return [place for place in _differing(replayed, made) if not _is_rounding(place, replayed, made)]


def _differing(first: NamedResults, other: NamedResults) -> list[int]:
    """Places of values that differ. What was compared on the GPU is read at once: one wait, however many there are."""
    pairs = [(value, made) for (_, value), (_, made) in zip(first.named, other.named, strict=True)]
    small = [place for place, pair in enumerate(pairs) if _are_small_and_alike(*pair)]
    known = {*small} if small and _all_same([pairs[place] for place in small]) else set()
    same: list[Any] = [place in known or _same_bits(*pair) for place, pair in enumerate(pairs)]
    on_device = [place for place, found in enumerate(same) if isinstance(found, Tensor)]
    if on_device:
        answers = [same[place].to(same[on_device[0]].device) for place in on_device]
        for place, answer in zip(on_device, torch.stack(answers).tolist(), strict=True):
            same[place] = answer
    return [place for place, found in enumerate(same) if not found]


def _are_small_and_alike(first: Any, other: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(other, Tensor) or not (first.is_cuda and other.is_cuda):
        return False
    alike = first.dtype == other.dtype and first.shape == other.shape and first.layout is torch.strided
    is_on_current_device = first.get_device() == other.get_device() == torch.cuda.current_device()
    return alike and is_on_current_device and first.nbytes <= SAVED_ALWAYS


def _all_same(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether all have the same bits, asked at once: hundreds of small tensors would take a thousand launches."""
    ones, others = (torch.cat([_bits_of(pair[side]) for pair in pairs]) for side in (0, 1))
    return bool((ones == others).all())


def _bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same_bits(first: Any, other: Any) -> Any:
    """True or False, or of tensors on a GPU the answer as a tensor there."""
    if not isinstance(first, Tensor) or not isinstance(other, Tensor):
        return type(first) is type(other) and bool(first == other)
    if first.dtype != other.dtype or first.shape != other.shape:
        return False
    bits, other_bits = [_bits_of(value.detach().to(first.device)) for value in (first, other)]
    same = (bits == other_bits).all()
    return same if same.is_cuda else bool(same)


def _is_rounding(place: int, replayed: NamedResults, made: NamedResults) -> bool:
    """Whether both are what the same numbers add up to in two orders. In sixteen bits a rounding hides too much."""
    value, other = replayed.named[place][1], made.named[place][1]
    distance = _distance(value, other)
    if distance == float("inf") or not (value.is_floating_point() or value.is_complex()) or value.dtype.itemsize < 4:
        return False
    return distance <= AS_FAR * torch.finfo(value.dtype).eps * float(other.detach().abs().max())


def _varies(
    place: int, replayed: NamedResults, made: NamedResults, replayed_again: NamedResults, spread: dict[int, float]
) -> bool:
    """Whether replays differ among themselves, and the eager call from them by little more."""
    first, eager, other = [outcome.named[place][1] for outcome in (replayed, made, replayed_again)]
    if _same_bits(eager, other):
        return True
    spread[place] = max(spread.get(place, 0.0), _distance(first, other))
    return _distance(first, eager) <= AS_FAR * spread[place]


def _distance(first: Any, other: Any) -> float:
    """Between the numbers that are furthest apart; infinite where they cannot be compared."""
    if (
        not isinstance(first, Tensor)
        or not isinstance(other, Tensor)
        or first.shape != other.shape
        or not first.numel()
    ):
        return float("inf")
    wide = torch.complex128 if first.is_complex() else torch.float64
    found = float((first.detach().to(wide) - other.detach().to(first.device, wide)).abs().max())
    return found if found == found else float("inf")
