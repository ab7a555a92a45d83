"""A captured call: its graph, and the memory that goes in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from keepbusy.runtime.graph.capture import Uncapturable, capture
from keepbusy.runtime.graph.names_read import PLAIN
from keepbusy.runtime.graph.participants import Cast, Gradients, Held, enter, leave
from keepbusy.runtime.graph.rollback import saved

# One call of a step: its tensors, which a graph takes in, and its constants, which it keeps.


class Call:
    """The arguments, taken apart."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.leaves, self.spec = tree_flatten((arguments, options))
        self.tensors = [one for one in self.leaves if isinstance(one, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that one graph can stand in for."""
        return self.spec, *map(_kind, self.leaves)

    def run(self, step: Callable[..., Any], tensors: list[Tensor] | None = None) -> Any:
        """With its own tensors, or with others in their place."""
        others = iter(self.tensors if tensors is None else tensors)
        leaves = [next(others) if isinstance(one, Tensor) else one for one in self.leaves]
        arguments, options = tree_unflatten(leaves, self.spec)
        return step(*arguments, **options)

    def labels(self) -> list[str]:
        """What a person calls the parts of `kind`."""
        return ["the structure of the arguments", *map(_label, self.leaves)]

    def check(self) -> None:
        """Raises if there is an argument that a graph can neither take in nor keep."""
        for leaf in self.leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise Uncapturable("an argument requires a gradient, which a replay would not hand back; detach it")
            if any(isinstance(one, Tensor) for one in _held(leaf)):
                raise Uncapturable(
                    f"an argument is a {type(leaf).__name__} that holds tensors, which a graph would keep as they are; "
                    "pass them in tuples, lists or dicts"
                )


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if type(leaf) in PLAIN else id(leaf)


def _label(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"an input of shape {tuple(leaf.shape)}"
    return f"the argument {leaf!r}" if type(leaf) in PLAIN else f"a {type(leaf).__name__} among the arguments"


def _held(leaf: Any) -> list[Any]:
    ours = isinstance(leaf, (Tensor, torch.nn.Module, type))
    return [] if ours or not hasattr(leaf, "__dict__") else [*vars(leaf).values()]


class Outputs:
    """What the captured step returned. Its tensors are overwritten by the next replay, so callers get copies."""

    def __init__(self, returned: Any) -> None:
        self._leaves, self._spec = tree_flatten(returned)
        for leaf in self._leaves:
            if not (type(leaf) in PLAIN or (isinstance(leaf, Tensor) and leaf.is_cuda)):
                told = "a tensor of the host" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise Uncapturable(
                    f"it returns {told}, which no replay would renew; "
                    "return tensors of the device, alone or in tuples, lists and dicts"
                )
        self.constants = [one for one in self._leaves if not isinstance(one, Tensor)]

    def copies(self) -> Any:
        """As they are after the replay that is under way."""
        return tree_unflatten(
            [one.detach().clone() if isinstance(one, Tensor) else one for one in self._leaves], self._spec
        )


def constants_of(returned: Any) -> list[Any]:
    """Numbers and texts that a step returns."""
    return [one for one in tree_flatten(returned)[0] if type(one) in PLAIN]


def differentiable(returned: Any) -> bool:
    return any(isinstance(one, Tensor) and one.requires_grad for one in tree_flatten(returned)[0])


def detached(returned: Any) -> Any:
    """As a replay would return it: without the graph of its gradients."""
    leaves, spec = tree_flatten(returned)
    return tree_unflatten([one.detach() if isinstance(one, Tensor) else one for one in leaves], spec)


# Eager calls on a stream of their own, the one that captures use: autograd remembers where a weight was first used.


class Aside:
    """Runs a step there; whoever called goes on when it is done, in the order of streams."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.stream = step, torch.cuda.Stream()

    def run(self, call: Call) -> Any:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return call.run(self.step)
        finally:
            current.wait_stream(self.stream)


# The memory that a graph reads its inputs from, and a second one beside it for what comes from the host.
#
# While a replay runs, the next batch travels into the second; it moves over on the device just before its own replay.


class Inputs:
    """Copies of the tensors of one call, in which each later call of the kind leaves its own."""

    def __init__(self, tensors: list[Tensor]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.static = [torch.empty_like(one, device=device) for one in tensors]
        self._from_host = [place for place, one in enumerate(tensors) if not one.is_cuda]
        self._beside = [torch.empty_like(self.static[place]) for place in self._from_host]
        self._copies = torch.cuda.Stream() if self._from_host else None
        self._taken, self._arrived = torch.cuda.Event(), torch.cuda.Event()
        self._alike = _by_type(self.static)
        self.fill(tensors)
        self._versions = [one._version for one in self.static]

    def fill(self, tensors: list[Tensor]) -> None:
        """Enqueue what brings them here. A batch of the host may be changed once `wait` has returned."""
        sources = [*tensors]
        if self._copies is not None:
            self._bring(tensors, self._copies)
            for place, beside in zip(self._from_host, self._beside, strict=True):
                sources[place] = beside
        for places in self._alike:
            torch._foreach_copy_([self.static[one] for one in places], [sources[one] for one in places])
        self._taken.record()

    def _bring(self, tensors: list[Tensor], copies: torch.cuda.Stream) -> None:
        copies.wait_event(self._taken)
        with torch.cuda.stream(copies):
            for place, beside in zip(self._from_host, self._beside, strict=True):
                beside.copy_(tensors[place], non_blocking=True)
            self._arrived.record()
        torch.cuda.current_stream().wait_event(self._arrived)

    def wait(self) -> None:
        """Until the host's tensors have been read. To be called when the replay is enqueued: it loses no time then."""
        if self._copies is not None:
            self._arrived.synchronize()

    def note_writes(self) -> None:
        """After the capture: which arguments the step writes to."""
        self._written = [
            place
            for place, (one, version) in enumerate(zip(self.static, self._versions, strict=True))
            if one._version != version
        ]

    def hand_back(self, tensors: list[Tensor]) -> None:
        """A step that writes to its arguments finds them written."""
        for place in self._written:
            tensors[place].copy_(self.static[place])


def _by_type(tensors: list[Tensor]) -> list[list[int]]:
    """Places of tensors of one type each: hundreds of them are copied with one launch."""
    groups: dict[torch.dtype, list[int]] = {}
    for place, one in enumerate(tensors):
        groups.setdefault(one.dtype, []).append(place)
    return [*groups.values()]


class Recorded:
    """Replays the step for calls of one kind."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Inputs, outputs: Outputs, gradients: list[Held], held: list[Any]
    ) -> None:
        self._graph, self._inputs, self._outputs, self._held = graph, inputs, outputs, held
        self._gradients = gradients

    def replay(self, tensors: list[Tensor]) -> Any:
        self._inputs.fill(tensors)
        return self.replay_filled(tensors)

    def replay_filled(self, tensors: list[Tensor]) -> Any:
        """The inputs are there already."""
        enter(self._gradients)
        self._graph.replay()
        leave(self._gradients)
        self._inputs.hand_back(tensors)
        returned = self._outputs.copies()
        self._inputs.wait()
        return returned


def record(call: Call, aside: Aside, cast: Cast, held: list[Any]) -> Recorded:
    """Capture one call. Nothing of it has happened then; raises Uncapturable with everything as it was."""
    call.check()
    inputs, gradients, restores = Inputs(call.tensors), Gradients(), saved(cast)
    try:
        with gradients.watching():
            graph, returned = capture(lambda: call.run(aside.step, inputs.static), aside.stream)
        outputs = Outputs(returned)
    except Uncapturable:
        gradients.restore()
        for restore in restores:
            restore()
        raise
    inputs.note_writes()
    left = gradients.held()
    gradients.restore()  # nothing has run yet: those that the step will leave behind hold no values
    return Recorded(graph, inputs, outputs, left, held)
