"""A captured call: how it is captured, its graph, and the memory that goes in and out.

What runs in a capture is kept as a CUDA graph, and nothing of it happens yet; a step that does what a graph cannot is
found there. PyTorch is told to refuse a sync before the driver sees it, so that the capture ends in good order; where
the driver refuses first, allocator and random numbers are put right by hand. (That refusal holds for the whole process:
a thread that waits for the device in the middle of a capture gets an error.)
"""

from __future__ import annotations

import gc
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from traceback import walk_tb
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepbusy.runtime.graph.host_state import BoundAnew, rollback_to_now
from keepbusy.runtime.graph.names_read import PLAIN
from keepbusy.runtime.graph.participants import HeldGradient, Participants, enter, is_weight, leave, weights_behind
from keepbusy.runtime.graph.reachable import has_memory
from keepbusy.runtime.graph.user_lines import code_of, line_of
from keepbusy.runtime.host_constants import CapturedConstants, ConstantReads
from keepbusy.runtime.later_backward import LaterBackward, OneOperation
from keepbusy.runtime.tensor_kinds import flatten_result, same_kinds
from keepbusy.torch_names.pytorch import abandon_pool, checks_arguments, foreach_copy, tree_flatten, tree_unflatten


class StepCall:
    """One call of a step: its tensors, which a graph takes in, and its constants, which it keeps."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any], changing: Collection[int] = ()) -> None:
        """`changing`: places among the leaves of numbers that a graph takes in as tensors."""
        self.given = (arguments, options)
        self.leaves, self.spec = tree_flatten(self.given)
        self._taken_in = set[int]()
        for place in changing:
            if place < len(self.leaves) and type(self.leaves[place]) is float:
                self.leaves[place] = torch.tensor(self.leaves[place], dtype=torch.float32)  # as operators take it
                self._taken_in.add(place)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that one graph can stand in for."""
        return self.spec, *map(_kind, self.leaves)

    def run(self, step: Callable[..., Any], tensors: list[Tensor] | None = None) -> Any:
        """As it was made, or with other tensors in their place. Numbers that a graph takes in are tensors here, too:
        rounded once more, they would differ from a replay."""
        if tensors is None and not self._taken_in:
            return step(*self.given[0], **self.given[1])
        others = iter(tensors or ())
        if tensors is None:
            leaves = [leaf.cuda() if place in self._taken_in else leaf for place, leaf in enumerate(self.leaves)]
        else:
            leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        arguments, options = tree_unflatten(leaves, self.spec)
        return step(*arguments, **options)

    def apart(self) -> StepCall:
        """The call with arguments of its own: autograd can go back to them and no further, though one may be made of
        another."""
        leaves, spec = tree_flatten(self.given)
        own = [leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        arguments, options = tree_unflatten(own, spec)
        return StepCall(arguments, options, self._taken_in)

    def changed(self) -> bool:
        """Whether the step has put something into a list or a dict among its arguments, or taken it out."""
        leaves, spec = tree_flatten(self.given)
        return spec != self.spec or any(map(operator.is_not, leaves, self.leaves))

    def places(self) -> list[int]:
        """Where the tensors among its arguments lie."""
        return [tensor.data_ptr() if has_memory(tensor) else id(tensor) for tensor in self.tensors]

    def numbers(self) -> dict[int, float]:
        """Those among the arguments, which a graph keeps as they are, by their places among the leaves."""
        return {place: leaf for place, leaf in enumerate(self.leaves) if type(leaf) in (int, float)}

    def labels(self) -> list[str]:
        """What a person calls the parts of `kind`."""
        return ["the structure of the arguments", *map(_label, self.leaves)]

    def check(self) -> None:
        """Raises if there is an argument that a graph can neither take in nor keep."""
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor | torch.nn.Module | torch.amp.GradScaler | type) and any(
                isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()
            ):
                raise Uncapturable(
                    f"an argument is a {type(leaf).__name__} that holds tensors, which a graph would keep as they are; "
                    "pass them in tuples, lists or dicts"
                )


class CallPattern:
    """What calls look like that are of the same kind as one before, found without taking each apart anew.

    Arguments in other containers than tuples, named or not, lists and dicts are taken apart every time.
    """

    def __init__(self, call: StepCall) -> None:
        leaves: list[Any] = []
        self._shape = _shape_of(call.given, leaves)
        self._same_kinds: Callable[..., bool] | None = None
        if len(leaves) == len(call.leaves) and all(map(operator.is_, leaves, call.leaves)):
            self._same_kinds = same_kinds(call.tensors)

    def tensors_of(self, given: Any) -> list[Tensor] | None:
        """Those of another call, if it is of this kind."""
        tensors: list[Tensor] = []
        if self._same_kinds is None or not _fits(given, self._shape, tensors) or not self._same_kinds(*tensors):
            return None
        return tensors


class _Shape(NamedTuple):
    """A container, and of what is in it: another, `_TENSOR`, or the constant itself."""

    kind: Any
    keys: list[Any] | None
    parts: list[Any]
    bare: bool  # all of them tensors


_TENSOR: Any = object()


def _shape_of(value: Any, leaves: list[Any]) -> Any:
    kind = value.__class__
    if kind is dict or kind is list or (issubclass(kind, tuple) and (kind is tuple or hasattr(kind, "_fields"))):
        parts = [_shape_of(inner, leaves) for inner in (value.values() if kind is dict else value)]
        return _Shape(kind, list(value) if kind is dict else None, parts, all(part is _TENSOR for part in parts))
    leaves.append(value)
    return _TENSOR if isinstance(value, Tensor) else value


def _fits(value: Any, shape: Any, tensors: list[Tensor]) -> bool:
    kind, keys, parts, bare = shape
    if value.__class__ is not kind or len(value) != len(parts):
        return False
    if keys is not None:
        if list(value) != keys:
            return False
        value = value.values()
    if bare:
        tensors += value  # whether they are any is asked of all together
        return True
    for inner, part in zip(value, parts, strict=True):
        if part is _TENSOR:
            tensors.append(inner)
        elif part.__class__ is _Shape:
            if not _fits(inner, part, tensors):
                return False
        elif inner is not part and (
            part.__class__ not in PLAIN or inner.__class__ is not part.__class__ or inner != part
        ):
            return False
    return True


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return (type(leaf), leaf) if type(leaf) in PLAIN else id(leaf)


def _label(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"an input of shape {tuple(leaf.shape)}"
    return f"the argument {leaf!r}" if type(leaf) in PLAIN else f"a {type(leaf).__name__} among the arguments"


class Outputs:
    """What the captured step returned. Its tensors are overwritten by the next replay, so callers get copies; weights
    that it returns they get themselves."""

    def __init__(self, returned: Any, weights: list[Tensor]) -> None:
        leaves, self._spec = flatten_result(returned)
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) and not is_weight(leaf) else leaf for leaf in leaves]
        for leaf in leaves:
            if is_weight(leaf) and not any(leaf is weight for weight in weights):
                raise Uncapturable("it returns a tensor that it makes itself and that gathers gradients")
            if not (type(leaf) in PLAIN or (isinstance(leaf, Tensor) and leaf.is_cuda)):
                what = "a tensor of the host" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise Uncapturable(
                    f"it returns {what}, which no replay would renew; "
                    "return tensors of the device, alone or in tuples, lists and dicts"
                )

    def copies(self) -> Any:
        """As they are after the replay that is under way."""
        if self._spec.is_leaf():  # a loss, mostly
            return _copied(self._leaves[0])
        return self.built(self.copied_leaves())

    def copied_leaves(self) -> list[Any]:
        return [*map(_copied, self._leaves)]

    def built(self, leaves: list[Any]) -> Any:
        return tree_unflatten(leaves, self._spec)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf


class EagerStream:
    """Runs a step eagerly on the stream that captures use: autograd remembers where a weight was first used.

    Whoever called goes on when it is done, in the order of streams.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.stream = step, torch.cuda.Stream()
        self.bound: BoundAnew | None = None

    def kept_in_place(self) -> AbstractContextManager[None]:
        """Around each call: what it binds anew is kept where a graph has it."""
        return nullcontext() if self.bound is None else self.bound.kept_in_place()

    def run(self, call: StepCall) -> Any:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return self.run_here(call)
        except BaseException:
            if self.bound is not None:
                self.bound.settle()
            raise
        finally:
            current.wait_stream(self.stream)

    def run_here(self, call: StepCall, tensors: list[Tensor] | None = None) -> Any:
        """On the current stream. What it calls that has graphs of its own runs as it is written: a graph holds no
        other."""
        thread = get_ident()
        _RUNNING.add(thread)
        try:
            returned = call.run(self.step, tensors)
            if self.bound is not None:
                self.bound.settle()
            return returned
        finally:
            _RUNNING.discard(thread)


_RUNNING = set[int]()
"""Threads that run a step which is, or will be, captured as a whole."""


def is_within_another() -> bool:
    return bool(_RUNNING) and get_ident() in _RUNNING


class Inputs:
    """The memory that a graph reads its inputs from, and a second one beside it for what comes from the host.

    While a replay runs, the next batch travels into the second; it moves over on the device just before its own replay.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.static = [torch.empty_like(tensor, device=device) for tensor in tensors]
        self._from_host = [place for place, tensor in enumerate(tensors) if not tensor.is_cuda]
        self._arrivals = [torch.empty_like(self.static[place]) for place in self._from_host]
        self._copies = torch.cuda.Stream() if self._from_host else None
        self._taken, self._arrived = torch.cuda.Event(), torch.cuda.Event()
        # hundreds of tensors of one type are copied with one launch
        self._by_type: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        for place, memory in enumerate(self.static):
            places, static = self._by_type.setdefault(memory.dtype, ([], []))
            places.append(place)
            static.append(memory)
        with torch.no_grad():
            self.fill(tensors)
        self._versions = [tensor._version for tensor in self.static]
        for memory, tensor in zip(self.static, tensors, strict=True):
            memory.requires_grad_(tensor.requires_grad)

    def fill(self, tensors: list[Tensor]) -> None:
        """Enqueue what brings them here. A batch of the host may be changed once `wait` has returned."""
        sources = [*tensors]
        if self._copies is not None:
            self._copies.wait_event(self._taken)
            with torch.cuda.stream(self._copies):
                for place, arrival in zip(self._from_host, self._arrivals, strict=True):
                    sources[place] = arrival.copy_(tensors[place], non_blocking=True)
                self._arrived.record()
            torch.cuda.current_stream().wait_event(self._arrived)
        for places, static in self._by_type.values():
            foreach_copy(static, [sources[place] for place in places])
        if self._copies is not None:
            self._taken.record()

    def wait(self) -> None:
        """Until the host's tensors have been read. To be called when the replay is enqueued: it loses no time then."""
        if self._copies is not None:
            self._arrived.synchronize()

    def note_writes(self) -> None:
        """After the capture: which arguments the step writes to."""
        self.written = [
            place
            for place, (static, version) in enumerate(zip(self.static, self._versions, strict=True))
            if static._version != version
        ]

    def hand_back(self, tensors: list[Tensor]) -> None:
        """A step that writes to its arguments finds them written."""
        for place in self.written:
            tensors[place].copy_(self.static[place])


class CapturedCall:
    """Replays the step for calls of one kind."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: Inputs,
        outputs: Outputs,
        gradients: list[HeldGradient],
        alive: list[Any],
        pattern: CallPattern,
        later: LaterBackward | None,
    ) -> None:
        self.later = later
        """Its backward pass, if that comes after the call."""
        self._graph, self._inputs, self._outputs, self.gradients = graph, inputs, outputs, gradients
        self._entered = [gradient for gradient in gradients if gradient.needed and gradient.entry is not None]
        self.pattern = pattern
        self.replays = 0
        self.is_doubted = False
        """Whether the last comparison found a difference. A second one in a row is the last."""
        self.schedules: list[Callable[[], Any]] = []
        """Steps of learning rate schedules, which follow each replay."""
        self._alive = alive  # what the graph reads without owning it
        self.read: list[Any] = []
        """What the step's names stood for when it was captured, or stand for since."""

    def replay(self, tensors: list[Tensor], is_in_place: bool = False) -> Any:
        """`is_in_place`: gradients are known to stand where a replay leaves them."""
        with torch.no_grad() if self.later is not None else nullcontext():
            self._inputs.fill(tensors)
        return self.replay_filled(tensors, is_in_place)

    def replay_filled(self, tensors: list[Tensor], is_in_place: bool = False) -> Any:
        """The inputs are there already."""
        self._enqueue(tensors, is_in_place)
        returned = self._outputs.copies()
        self._inputs.wait()
        return returned

    def is_awaited(self) -> bool:
        """Whether its memory is needed for a backward pass that may still come."""
        return self.later is not None and self.later.is_awaited()

    def replay_before_backward(self, tensors: list[Tensor], made_again: Callable[[], tuple[Any, list[Tensor]]]) -> Any:
        """Autograd can go back from what it returns. `made_again` runs the call as it is written, from the state that
        it finds now; it returns what that does and the tensors that it was given."""
        later = self.later
        assert later is not None
        leaves: list[Any] = []

        def forward() -> tuple[list[Tensor], Callable[[Any], Any]]:
            call = later.replayed(lambda: later.ends_of(*made_again()))
            self._inputs.fill(tensors)
            self._enqueue(tensors)
            leaves.extend(self._outputs.copied_leaves())
            self._inputs.wait()
            return later.outputs_of_leaves(leaves), call.go_back

        sources = later.sources(tensors)
        differentiable = OneOperation.apply(forward, *sources)
        for place, result in zip(later.places, differentiable, strict=True):
            leaves[place] = result
        return self._outputs.built(leaves)

    def _enqueue(self, tensors: list[Tensor], is_in_place: bool = False) -> None:
        enter(self._entered)
        self._graph.replay()
        if not is_in_place:
            leave(self.gradients)
        self._inputs.hand_back(tensors)

    def written_to(self, tensors: list[Tensor]) -> list[Tensor]:
        """The arguments that the step writes to."""
        return [tensors[place] for place in self._inputs.written]

    def take_gradients(self) -> None:
        """Those that an eager call has left go where a replay leaves them."""
        for leaf, _, exit_, _ in self.gradients:
            if exit_ is not None and leaf.grad is not None and leaf.grad is not exit_:
                exit_.copy_(leaf.grad)
                leaf.grad = exit_


def capture_call(
    call: StepCall, eager: EagerStream, participants: Participants, alive: list[Any], reads: ConstantReads | None = None
) -> CapturedCall:
    """Nothing of the call has happened on the device then; raises Uncapturable with everything as it was.

    `reads`: what the host reads of tensors that are the same at each call, which it may make then, and copy.
    """
    call.check()
    inputs, restores = Inputs(call.tensors), rollback_to_now(participants)
    constants = CapturedConstants(reads) if reads is not None else None

    def run() -> Any:
        with constants or nullcontext():
            return eager.run_here(call, inputs.static)

    later: LaterBackward | None = None
    try:
        with participants.watching(is_captured=True) as gradients:
            graph, returned = capture(run, eager.stream, code_of(eager.step))
        outputs, leaves = Outputs(returned, participants.gathering()), flatten_result(returned)[0]
        if gradients.may_go_back(leaves):
            if any(
                static.requires_grad != tensor.requires_grad
                for static, tensor in zip(inputs.static, call.tensors, strict=True)
            ):
                raise Uncapturable("it has an argument require a gradient that did not; do so outside of the step")
            later = LaterBackward(leaves, inputs.static, weights_behind(leaves))
            if later.has_hooks():
                raise Uncapturable(HOOKS_ON_WEIGHTS)
            later.captured(*capture(later.go_back, eager.stream, None, is_tidied=False, pool=graph.pool()))
        elif any(tensor.requires_grad for tensor in call.tensors):
            raise Uncapturable("an argument requires a gradient, which a replay would not hand back; detach it")
    except Uncapturable:
        for restore in (gradients.restore, *restores):
            restore()
        if eager.bound is not None:
            eager.bound.put_back()
        raise
    inputs.note_writes()
    held = gradients.held()
    gradients.restore()  # nothing has run yet: those that the step will leave behind hold no values
    return CapturedCall(
        graph, inputs, outputs, held, [*alive, constants and constants.read_by_graph()], CallPattern(call), later
    )


HOOKS_ON_WEIGHTS = "a weight has a hook on its gradient, and the backward pass comes after the call"
HOST_COPY = "the host waits for the device or copies from pageable memory"
LEGACY_STREAM = "legacy stream depend on a capturing"
"""What CUDA says of a capture that waits for the default stream."""


def renew_gradient_nodes(leaves: Collection[Tensor]) -> None:
    """Let autograd make anew what gathers their gradients, on the stream that it is used on next.

    It is made where a tensor is first used, and lives on with whatever was computed there: a network that chose an
    action with gradients on gathers them on the default stream, which a capture must not touch. A tensor that was of
    another type meanwhile gets a new one.
    """
    for leaf in leaves:
        own = leaf.data
        leaf.data = own.new_empty(0, dtype=torch.float32 if own.dtype == torch.float64 else torch.float64)
        leaf.data = own


class Uncapturable(Exception):  # noqa: N818 -- it is a finding, and always caught
    """Why a graph cannot stand in for the step, as the end of a sentence, and the line of the step that shows it."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


def capture(
    run: Callable[[], Any], stream: torch.cuda.Stream, code: CodeType | None, is_tidied: bool = True, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of what `run` enqueues, and what it returned. After an exception nothing is captured.

    `code`: of the step that it runs. `is_tidied`: whether garbage is collected and unused memory given back first,
    which takes a while. `pool`: memory that it shares with another graph.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    if is_tidied:
        gc.collect()
        torch.cuda.empty_cache()
    reason: Uncapturable | None = None
    with torch.cuda.stream(stream), _undisturbed():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with sync_mode("error"):
                result = run()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                graph.capture_end()
            is_empty = any("CUDA Graph is empty" in str(warning.message) for warning in said)
        except Exception as error:
            line = next((line for frame, line in walk_tb(error.__traceback__) if frame.f_code is code), 0)
            reason = Uncapturable(_reason_of(error), line)
        except BaseException:
            _abandon(graph, pool)
            raise
        if reason:  # the error is gone by now, and with it the tensors that its traceback held
            _abandon(graph, pool)
            raise reason
    if is_empty:
        raise Uncapturable("it has the GPU do nothing")
    return graph, result


@contextmanager
def sync_mode(mode: str | int) -> Iterator[None]:
    """What PyTorch does before it waits for the device. A capture must have begun before syncs are errors."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see every sync
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def without_argument_checks() -> Iterator[None]:
    """`torch.distributions` does not check its arguments, which reads the GPU: it did so in the eager calls before."""
    kind: Any = torch.distributions.Distribution
    checks = checks_arguments(kind)
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(checks)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing is collected, which may free memory or graphs and so break the capture. Weights that autocast has cast
    before are not used, which would stay as they are in all replays, and the graph's own do not leak out."""
    collects = gc.isenabled()
    gc.disable()
    torch.clear_autocast_cache()
    try:
        with without_argument_checks():
            yield
    finally:
        torch.clear_autocast_cache()
        if collects:
            gc.enable()


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        try:
            graph.capture_end()
        except RuntimeError:  # it was invalid: PyTorch stopped before it told the allocator and the generator
            _INVALID_GRAPHS.append(graph)
            device = torch.cuda.current_device()
            abandon_pool(device, pool)
            whole = torch.cuda.CUDAGraph()  # a capture that ends well tells the generator that none is under way
            whole.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            whole.capture_end()
    graph.reset()


_INVALID_GRAPHS: list[torch.cuda.CUDAGraph] = []
"""Kept for good: the allocator of pinned memory goes on asking a graph whose capture was invalid."""
_SYNC_MESSAGES = re.compile(
    "synchronizing CUDA operation|stream is capturing|during capture|capturing stream|Cannot copy between CPU and CUDA"
)


def _reason_of(error: Exception) -> str:
    line, text = line_of(error), (str(error).strip() or type(error).__name__).splitlines()[0]
    where = f"at {line} " if line else "somewhere "
    if _SYNC_MESSAGES.search(text):
        return (
            f"{where}{HOST_COPY}, and a graph replays device work alone; "
            "move that out of the step, or read the value later"
        )
    return f"{where}capturing it failed with «{text}»"
