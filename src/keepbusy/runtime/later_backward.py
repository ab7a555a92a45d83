"""The backward pass of a captured call, where it comes after the call: a graph of its own.

To autograd the call is one operation. Going forward it replays the one graph, going back the other, which reads what
the first has left in their memory. So a graph whose backward pass may still come must not be replayed again: it is
awaited. A backward pass that no graph can stand in for, such as one that is differentiated itself, runs the call once
more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.tensor_kinds import flatten_result
from keepbusy.torch_names.pytorch import flatten_tensors, unflatten_tensors

Gradients = tuple[Tensor | None, ...]
Ends = tuple[list[Tensor], list[Tensor]]
"""The results of a call that have gradients, and what these go back to."""
_HOOKS = attrgetter("_backward_hooks")


class LaterBackward:
    """From gradients of results to those of arguments and weights."""

    def __init__(self, results: list[Any], inputs: list[Tensor], weights: Iterable[Tensor]) -> None:
        """`inputs`: the memory that the graph of the call reads its arguments from."""
        self.places = [
            place for place, result in enumerate(results) if isinstance(result, Tensor) and result.grad_fn is not None
        ]
        """Of the results that have a gradient."""
        self._outputs: list[Tensor] = [results[place] for place in self.places]
        self.inputs = [place for place, tensor in enumerate(inputs) if tensor.requires_grad]
        """Places of the arguments that have one."""
        own = [inputs[place] for place in self.inputs]
        self.weights = [weight for weight in weights if all(weight is not source for source in own)]
        self._sources = [*own, *self.weights]
        self._given = [torch.empty_like(output) for output in self._outputs]
        self._last: Callable[[], ReplayedCall | None] = lambda: None
        self.finding, self.is_doubted = "", False
        """Why no replay may stand in for a backward pass; whether the last comparison found a difference."""

    def go_back(self) -> list[list[Tensor]]:
        """To be captured: the gradients by their type, each type in one piece of memory."""
        found = torch.autograd.grad(self._outputs, self._sources, self._given, retain_graph=True, allow_unused=True)
        self._by_type: dict[torch.dtype, list[int]] = {}
        for place, gradient in enumerate(found):
            if gradient is not None:
                self._by_type.setdefault(gradient.dtype, []).append(place)
        self._alike = [
            torch.empty_like(source_gradient, device="meta") if source_gradient is not None else None
            for source_gradient in found
        ]
        return [[flatten_tensors([found[place] for place in places])] for places in self._by_type.values()]

    def captured(self, graph: torch.cuda.CUDAGraph, flat: list[list[Tensor]]) -> None:
        self._graph, self._flat = graph, [gradients for (gradients,) in flat]
        del self._outputs  # and with them what autograd remembers

    def has_hooks(self) -> bool:
        """Whether a weight has hooks, which a graph would hold, and autograd call once more."""
        return any(map(_HOOKS, self.weights))

    def sources(self, tensors: list[Tensor]) -> list[Tensor]:
        """The arguments of a call that have a gradient, and the weights."""
        return [*[tensors[place] for place in self.inputs], *self.weights]

    def ends_of(self, returned: Any, tensors: list[Tensor]) -> Ends:
        return self.outputs_of_leaves(flatten_result(returned)[0]), self.sources(tensors)

    def outputs_of_leaves(self, leaves: list[Any]) -> list[Tensor]:
        return [leaves[place] for place in self.places]

    def is_awaited(self) -> bool:
        """Whether the backward pass of the last replay may still come."""
        last = self._last()
        return last is not None and not last.is_over

    def replayed(self, made_again: Callable[[], Ends]) -> ReplayedCall:
        """To be called before the forward replay. `made_again` runs the call as it is written, from what it found."""
        call = ReplayedCall(self, made_again)
        self._last = weakref.ref(call)
        return call

    def is_last(self, call: ReplayedCall) -> bool:
        """Whether the memory of the graphs still holds what this call has left."""
        return self._last() is call

    def note(self, difference: str) -> None:
        """A second difference in a row is the last: sums in no order may be far apart once."""
        if self.is_doubted:
            self.finding = difference
        self.is_doubted = bool(difference)

    def replay(self, given: Gradients) -> Gradients:
        for static, gradient in zip(self._given, given, strict=True):
            static.zero_() if gradient is None else static.copy_(gradient)
        self._graph.replay()
        found: list[Tensor | None] = [None] * len(self._alike)
        for flat, places in zip(self._flat, self._by_type.values(), strict=True):
            parts = unflatten_tensors(flat.clone(), [self._alike[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part
        return tuple(found)


class ReplayedCall:
    """One call: how its backward pass is made when it comes."""

    def __init__(self, later: LaterBackward, made_again: Callable[[], Ends]) -> None:
        self._later, self._again = later, made_again
        self.is_over = False

    def go_back(self, given: Gradients) -> Gradients:
        self.is_over = True
        if torch.is_grad_enabled() or not self._later.is_last(self):
            return gradients_of(*self._again(), given)
        return self._later.replay(given)


def gradients_of(outputs: list[Tensor], sources: list[Tensor], given: Gradients) -> Gradients:
    """As autograd makes them, differentiable where the backward pass that asks for them is."""
    pairs = [(output, gradient) for output, gradient in zip(outputs, given, strict=True) if gradient is not None]
    made, of_made = [output for output, _ in pairs], [gradient for _, gradient in pairs]
    is_differentiable = torch.is_grad_enabled()
    return torch.autograd.grad(
        made, sources, of_made, create_graph=is_differentiable, retain_graph=True, allow_unused=True
    )


class OneOperation(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not typed here
    """What autograd sees of a call."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[[], tuple[list[Tensor], Callable[[Gradients], Gradients]]], *_sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results, ctx.go_back = call()
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.go_back(given))
