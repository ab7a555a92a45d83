"""Forward and backward pass of a module, each captured as one CUDA graph, behind one node of autograd's.

What goes in is copied to where the graph reads it, and what comes out is handed out as copies: no later turn overwrites
what the program holds. Who goes back otherwise than when the graphs were captured (through other outputs, or with a
graph of the gradients) gets what PyTorch makes of the forward pass done once more.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from keepbusy.fix.live.switch import ours
from keepbusy.runtime.graph.captured_call import Inputs, StepCall, Uncapturable, capture
from keepbusy.runtime.graph.names_read import PLAIN

Given: TypeAlias = Sequence[Tensor | None]
"""Gradients of what a module returned; none where nobody went back."""


class WayBack:
    """What lies behind some tensors in autograd's graph."""

    def __init__(self, roots: Sequence[Tensor], ends: Iterable[Tensor] = (), since: int = 0) -> None:
        """Not past what `ends` came from. Nodes older than `since` were made by somebody else."""
        self.edges: Counter[tuple[Any, int]] = Counter()
        """How often it goes along each, that of a root not counted."""
        self.roots = [(one.grad_fn, one.output_nr) for one in roots]
        self.leaves: dict[int, Tensor] = {}
        self.saved: set[int] = set()
        """Where memory lies that it reads."""
        self.is_closed = True
        self.has_state = False
        """Whether a library keeps something of its own from call to call."""
        self._ends = {one.grad_fn for one in ends}
        seen, ahead = {*self._ends}, [node for node, _ in self.roots]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                self.leaves[id(node.variable)] = node.variable
                continue
            self.is_closed &= node._sequence_nr() >= since
            self.has_state |= type(node).__name__ == "CudnnRnnBackward0" and node._saved_dropout > 0
            self.saved |= _saved(node)
            for following, place in node.next_functions:
                if following is not None:
                    self.edges[following, place] += 1
                    ahead.append(following)
        self.nodes = len(seen)
        self.name = next((type(node).__name__ for node, _ in self.roots if node is not None), "")
        """Of what made the first root: the program may print it."""

    def reached_by(self, whole: WayBack) -> set[int]:
        """Through which of the roots that other way comes from outside."""
        return {
            place
            for place, edge in enumerate(self.roots)
            if edge in whole.roots or whole.edges[edge] > self.edges[edge]
        }

    def finding(self, whole: WayBack) -> str:
        """Why one node may not stand in for all of it.

        Where gradients add up, those from later nodes come first. So what comes to a root from outside is added first
        either way; but what comes to a weight from within would come as one sum.
        """
        ends = {edge for edge in self.edges if edge[0] in self._ends or type(edge[0]).__name__ == "AccumulateGrad"}
        for edge, times in self.edges.items():
            if whole.edges[edge] > times and edge in ends and times > 1:
                return "gradients are added up within it and outside, and their order would change"
            if whole.edges[edge] > times and edge not in ends and edge not in self.roots:
                return "somebody goes back through what it computes on its way"
        return ""


def _saved(node: Any) -> set[int]:
    found = set()
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                held = getattr(node, name)
            except RuntimeError:  # it has been freed
                continue
            parts = held if isinstance(held, tuple | list) else [held]
            found |= {one.untyped_storage().data_ptr() for one in parts if isinstance(one, Tensor) and is_dense(one)}
    return found


def is_dense(tensor: Tensor) -> bool:
    """Others, sparse or nested ones, have no memory and no strides to ask for."""
    return tensor.layout is torch.strided and not tensor.is_nested


def newest_node() -> int:
    """The number of a node that this thread has made just now."""
    with torch.enable_grad():
        made = torch.ones((), requires_grad=True).neg().grad_fn
    assert made is not None
    return int(made._sequence_nr())


class TrainedModule(NamedTuple):
    """A module as it is called, what takes part in the call, and what autograd would keep for the way back."""

    plain: Callable[..., Any]
    modules: list[nn.Module]
    weights: list[Tensor]
    saved: set[int]
    is_random: bool
    made_by: str

    def kept(self, tensors: list[Tensor]) -> list[Tensor]:
        return [one for one in (*tensors, *self.weights) if one.untyped_storage().data_ptr() in self.saved]

    def state(self) -> DeviceState:
        return DeviceState([one for part in self.modules for one in part._buffers.values() if one is not None])


class DeviceState:
    """What a forward pass changes on the device: random numbers and buffers, as they are now."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self.values = [torch.cuda.get_rng_state(), *[one.clone() for one in buffers]]

    def restore(self) -> None:
        torch.cuda.set_rng_state(self.values[0])
        for one, before in zip(self._buffers, self.values[1:], strict=True):
            one.data.copy_(before)  # what autograd keeps of it elsewhere is not to seem changed


class PassGraphs:
    """The graphs of one kind of call, and the memory that they read and write."""

    def __init__(self, module: TrainedModule, call: StepCall, reached: set[int]) -> None:
        """`reached`: the outputs through which gradients come. Raises Uncapturable with everything as it was."""
        with torch.no_grad():
            self._inputs = Inputs(call.tensors)
        for static, one in zip(self._inputs.static, call.tensors, strict=True):
            static.requires_grad_(one.requires_grad)
        self.reached, self._stream = reached, torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        with _stand_ins(module) as weights:
            wanted = [*self._inputs.static, *weights]
            self._places = [place for place, one in enumerate(wanted) if one.requires_grad]
            self._count, self._wanted = len(wanted), [wanted[place] for place in self._places]
            self._rehearse(module, call, stream)
            self._forward, returned = capture(
                lambda: call.run(module.plain, self._inputs.static), stream, is_tidied=False
            )
        self.leaves, self.spec = tree_flatten(returned)
        outputs = _outputs(self.leaves, [*self._inputs.static, *module.weights])
        self.differentiable = [one.requires_grad for one in outputs]
        self._arriving = [torch.empty_like(one) for place, one in enumerate(outputs) if place in reached]
        self._backward, gradients = capture(lambda: self._go_back(outputs), stream, is_tidied=False)
        self._returned = [one.detach() for one in outputs]
        self._gradients = [None if one is None else one.detach() for one in gradients]
        self._wanted.clear()
        self.last: weakref.ref[Passage] | None = None
        """Who replayed it last: until nobody can go back through that, it may not be replayed anew."""

    def _rehearse(self, module: TrainedModule, call: StepCall, stream: torch.cuda.Stream) -> None:
        """Forward and back on the stream that will capture, where libraries make what they need; all for nothing."""
        before = module.state()
        stream.wait_stream(self._stream)
        with torch.cuda.stream(stream):
            outputs = [one for one in tree_leaves(call.run(module.plain, self._inputs.static)) if _is_tensor(one)]
            self._arriving = [torch.zeros_like(one) for place, one in enumerate(outputs) if place in self.reached]
            self._go_back(outputs)
        self._stream.wait_stream(stream)
        before.restore()

    def _go_back(self, outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        roots = [one for place, one in enumerate(outputs) if place in self.reached]
        with torch.autocast("cuda", enabled=False):
            return torch.autograd.grad(roots, self._wanted, self._arriving, allow_unused=True)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of what the module returns."""
        current = torch.cuda.current_stream()
        if current != self._stream:  # all calls share memory
            current.wait_stream(self._stream)
            self._stream = current
        self._inputs.fill(tensors)
        self._forward.replay()
        return [one.clone() for one in self._returned]

    def backward(self, given: list[Tensor]) -> list[Tensor | None]:
        """Gradients of what goes in and of weights, as copies."""
        if given:
            torch._foreach_copy_(self._arriving, given)
        self._backward.replay()
        made: list[Tensor | None] = [None] * self._count
        for place, one in zip(self._places, _copies(self._gradients), strict=True):
            made[place] = one
        return made

    def is_open(self) -> bool:
        passage = self.last() if self.last is not None else None
        return passage is not None and not passage.is_over


@contextmanager
def _stand_ins(module: TrainedModule) -> Iterator[list[Tensor]]:
    """In place of the weights others in the same memory, of which autograd has seen nothing: no turn before, no step.

    What reaches a weight by another name than the module's is not trained then, which the comparison shows.
    """
    made = {id(one): nn.Parameter(one.data) for one in module.weights}
    places = [
        (owner, name, one)
        for owner in module.modules
        for name, one in owner._parameters.items()
        if one is not None and id(one) in made
    ]
    try:
        for owner, name, one in places:
            setattr(owner, name, made[id(one)])
        yield [made[id(one)] for one in module.weights]
    finally:
        for owner, name, one in places:
            setattr(owner, name, one)


def _is_tensor(one: Any) -> bool:
    return isinstance(one, Tensor)


def _outputs(leaves: list[Any], others: list[Tensor]) -> list[Tensor]:
    """The tensors among what the module returned; each must have memory of its own."""
    for one in leaves:
        if type(one) not in PLAIN and not (type(one) is Tensor and one.is_cuda):
            raise Uncapturable(f"it returns a {type(one).__name__}")
    found = [one for one in leaves if isinstance(one, Tensor)]
    memory = {one.untyped_storage().data_ptr() for one in found}
    if len(memory - {one.untyped_storage().data_ptr() for one in others}) < len(found):
        raise Uncapturable("it returns a part of another tensor")
    return found


def _copies(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """All in a few launches: times one, which changes no bit."""
    made: list[Tensor | None] = [None] * len(gradients)
    by_type: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for place, one in enumerate(gradients):
        if one is not None:
            by_type.setdefault(one.dtype, []).append((place, one))
    for alike in by_type.values():
        copies = torch._foreach_mul([one for _, one in alike], 1)
        for (place, _), one in zip(alike, copies, strict=True):
            made[place] = one
    return made


class Passage:
    """One call of a module, forward and back, as it is written: what every other way has to equal."""

    def __init__(self, module: TrainedModule, call: StepCall) -> None:
        self.module, self.call, self.is_over = module, call, False
        self.leaves: list[Any] = []
        self.spec: Any = None
        self.differentiable: list[bool] = []

    def run(self) -> Any:
        """What the call returns."""
        made = iter(_node_named(self.module.made_by).apply(self, *self.call.tensors, *self.module.weights))
        return tree_unflatten([next(made) if isinstance(one, Tensor) else one for one in self.leaves], self.spec)

    def forward(self) -> list[Tensor]:
        self._note_random()
        with torch.enable_grad():
            self._inputs = [one.detach().requires_grad_(one.requires_grad) for one in self.call.tensors]
            returned = self.call.run(self.module.plain, self._inputs)
        self.leaves, self.spec = tree_flatten(returned)
        self._outputs = _outputs(self.leaves, [*self._inputs, *self.module.weights])
        self.differentiable = [one.requires_grad for one in self._outputs]
        return [one.detach() for one in self._outputs]

    def backward(self, given: Given) -> list[Tensor | None]:
        if torch.is_grad_enabled():  # gradients of these gradients are to come
            return self._again(given)
        return self._gradients(self._outputs, self._inputs, given, retain_graph=not self.is_over)

    def _gradients(
        self, outputs: list[Tensor], inputs: list[Tensor], given: Given, **options: Any
    ) -> list[Tensor | None]:
        wanted = [*inputs, *self.module.weights]
        made: list[Tensor | None] = [None] * len(wanted)
        places = [place for place, one in enumerate(wanted) if one.requires_grad]
        roots = [(one, came) for one, came in zip(outputs, given, strict=True) if came is not None]
        found = torch.autograd.grad(
            [one for one, _ in roots],
            [wanted[place] for place in places],
            [came for _, came in roots],
            allow_unused=True,
            **options,
        )
        for place, one in zip(places, found, strict=True):
            made[place] = one
        return made

    def _again(self, given: Given) -> list[Tensor | None]:
        """The forward pass once more, from where it began."""
        after = self.module.state()
        if self.module.is_random:
            torch.cuda.set_rng_state(self.random)
        with torch.enable_grad(), ours():  # this is a thread of autograd's
            returned = self.call.run(self.module.plain)
        after.restore()
        outputs = [one for one in tree_flatten(returned)[0] if isinstance(one, Tensor)]
        return self._gradients(outputs, self.call.tensors, given, create_graph=torch.is_grad_enabled())

    def _note_random(self) -> None:
        if self.module.is_random:
            self.random = torch.cuda.get_rng_state()


class ReplayedPassage(Passage):
    """By the graphs."""

    def __init__(self, module: TrainedModule, call: StepCall, graphs: PassGraphs) -> None:
        super().__init__(module, call)
        self.graphs = graphs
        self.leaves, self.spec, self.differentiable = graphs.leaves, graphs.spec, graphs.differentiable

    def forward(self) -> list[Tensor]:
        self._note_random()
        self.graphs.last = weakref.ref(self)
        return self.graphs.forward(self.call.tensors)

    def backward(self, given: Given) -> list[Tensor | None]:
        came = {place for place, one in enumerate(given) if one is not None}
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or came != self.graphs.reached:
            return self._again(given)
        return self.graphs.backward([one for one in given if one is not None])


@cache
def _node_named(name: str) -> Any:
    """Of that name when somebody prints what it made."""
    kind: Any = type(_PassageNode.__name__, (_PassageNode,), {})
    kind._backward_cls.__name__ = name
    return kind


class _PassageNode(torch.autograd.Function):  # type: ignore[misc]
    """What autograd sees of a passage."""

    @staticmethod
    def forward(context: Any, passage: Passage, *_: Tensor) -> tuple[Tensor, ...]:
        context.set_materialize_grads(False)
        context.passage = passage
        made = passage.forward()
        context.save_for_backward(*passage.module.kept(passage.call.tensors))
        context.mark_non_differentiable(
            *[one for one, due in zip(made, passage.differentiable, strict=True) if not due]
        )
        return tuple(made)

    @staticmethod
    def backward(context: Any, *given: Tensor | None) -> Any:
        context.saved_tensors  # noqa: B018 -- PyTorch says if one was written to, or if somebody was here before
        passage = context.passage
        passage.is_over = not torch._C._autograd._get_current_graph_task_keep_graph()
        return None, *passage.backward(given)
