"""`graph`: a training step captured once as a CUDA graph, and replayed from then on.

    step = keepbusy.graph(train_step)
    for batch in loader:
        losses.append(step(batch))

The step may be all of it (forward, backward, optimizer) or forward and backward alone. Its first calls are eager and
count like any other. A step that cannot be captured runs eagerly for good, and one warning names the line.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from keepbusy.runtime.graph.bound_step import BoundArguments, BoundStep, identity
from keepbusy.runtime.graph.captured_call import (
    CapturedCall,
    EagerStream,
    StepCall,
    Uncapturable,
    capture_call,
)
from keepbusy.runtime.graph.host_state import (
    HostChange,
    HostState,
    StateKey,
    changes_between,
    settings,
)
from keepbusy.runtime.graph.module_state import ModuleState, read_by_class
from keepbusy.runtime.graph.named_values import NamedValues
from keepbusy.runtime.graph.names_read import PLAIN, StepNames
from keepbusy.runtime.graph.participants import Gradients, HeldSchedules, Participants, may_be_held
from keepbusy.runtime.graph.replay_check import (
    COMPARED_FIRST,
    WrittenTensors,
    is_compared,
    replay_compared,
)
from keepbusy.runtime.graph.user_lines import LineTracer, depth_of_user
from keepbusy.runtime.module_parts import submodules

P = ParamSpec("P")
R = TypeVar("R")
GRAPHS_PER_STEP = 8
"""So many kinds of call (shapes, constants, modes) may get a graph; each has the memory of a step of its own."""


UNSTEADY_CALLS = 4
"""So many calls of a kind may change something on the host that none before them changed."""
BACKWARD_LATER = "its backward pass comes later, where a replay has no part; call backward inside the step"


class GraphKey:
    """What besides its arguments decides what a step does: modes, settings, what it reads, where its weights lie.

    All of it is constant in a graph. So it is read before each replay, and another graph is taken where it differs.
    """

    def __init__(self, participants: Participants, names: StepNames, rates: LearningRates) -> None:
        self._participants, self._optimizers = participants, [*participants.optimizers]
        self._named, self._words, self._rates = NamedValues(names), names.words, rates
        self._leaves: dict[int, Tensor] = {}
        self.renew()

    def renew(self) -> None:
        """The modules that there are now."""
        modules = submodules([*self._participants.modules, *self._named.modules()])
        self._of_modules = ModuleState(modules, self._is_read)
        of_modules = {id(tensor) for tensor in self._of_modules.tensors()}
        self._others = [leaf for leaf in self.leaves if id(leaf) not in of_modules]

    def _is_read(self, module: torch.nn.Module, name: str) -> bool:
        kind: Any = type(module)
        return name in self._words or name in read_by_class(kind)

    def add(self, leaves: list[Tensor]) -> None:
        """Tensors that gather gradients in the step."""
        self._leaves |= {id(one): one for one in leaves}
        self.renew()

    @property
    def leaves(self) -> list[Tensor]:
        return [*self._leaves.values()]

    def kind(self) -> tuple[Any, ...]:
        """What may come back: an evaluation in between, gradients that were cleared, another setting."""
        try:
            numbers = self._of_modules.numbers()
        except KeyError:  # one is gone
            self.renew()
            numbers = self._of_modules.numbers()
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            numbers,
            tuple([one.grad is None for one in self._leaves.values()]),
            *[
                settings(group | self._rates.of_its_own(group))
                for optimizer in self._optimizers
                for group in optimizer.param_groups
            ],
            *self._named.read(),
        )

    def remember_places(self) -> None:
        """Where weights and optimizer state lie."""
        self._of_modules.remember()
        self._places = self._of_others()

    def has_moved(self) -> bool:
        """When any of them has, no graph is of use any more."""
        return not self._of_modules.is_as_remembered() or self._of_others() != self._places

    def _of_others(self) -> list[int]:
        leaves, optimizers = self._others, self._optimizers
        return [*[leaf.data_ptr() for leaf in leaves], *[id(optimizer.state) for optimizer in optimizers]]

    def held(self) -> list[Any]:
        """What a graph may read without owning it, to be kept alive for it."""
        return [*self._named.held(), *[optimizer.state for optimizer in self._optimizers]]

    def labels(self) -> list[str]:
        """What a person calls the parts of `kind`."""
        groups = [f"the settings of {type(one).__name__}" for one in self._optimizers for _ in one.param_groups]
        fixed = [
            "whether gradients are on",
            "autocast",
            "a mode or a number of a module",
            "which gradients are cleared",
        ]
        return [*fixed, *groups, *self._named.labels()]


class ReplayWorth:
    """Whether replays take Python less time than calls as they are written: the quickest of a few of each is compared.

    Whoever waits for the GPU gains nothing from a graph, and loses nothing.
    """

    REPLAYS, EAGER, SLOWER = 12, 4, 1.05

    def __init__(self) -> None:
        self._replays: list[int] = []
        self._eager: list[int] = []

    def time_eager(self, run: Callable[[], R]) -> R:
        began = time.perf_counter_ns()
        returned = run()
        self._eager.append(time.perf_counter_ns() - began)
        return returned

    def replayed(self, took: int) -> bool:
        """One more. Whether it is decided now."""
        self._replays.append(took)
        return len(self._replays) >= self.REPLAYS and len(self._eager) >= self.EAGER

    def finding(self) -> str:
        """Why not to replay; "" if it is worth while."""
        replay, eager = min(self._replays), min(self._eager)
        if replay <= self.SLOWER * eager:
            return ""
        return f"a replay takes Python {replay / 1e6:.2f} ms, and the call as it is written {eager / 1e6:.2f} ms"


class Rehearsal:
    """The first calls of a step: eager training steps like any other, which show what a graph would have to hold.

    1. Libraries load, optimizers make their state; modules and optimizers are met.
    2. The host's state is read before and after. What differs, a replay would leave undone.
    3. If something differed, the step is traced to find the line. If not, it is captured from here on.

    Results are like those of a replay: without the graph of their gradients. `finding` says why the step cannot be
    captured, once that is known.
    """

    def __init__(self, eager: EagerStream) -> None:
        self.participants, self.finding = Participants(), ""
        self.worth = ReplayWorth()
        self.holds = False
        """Whether schedules step once the call is over."""
        self._eager = eager
        self._calls = [self._first_call, self._second_call]
        self._trained: list[Tensor] = []
        self._changes: list[HostChange] = []
        self._seen: tuple[Any, ...] = ()
        self._returned: tuple[Any, Any] = (None, None)
        self._numbers: list[dict[int, float]] = []
        self.changing: frozenset[int] = frozenset()
        """Places of arguments that are other numbers at each call, which a graph takes in."""

    def run(self, call: StepCall) -> Any:
        """One eager call."""
        self._numbers = [*self._numbers[-2:], call.numbers()]
        if not self._calls:
            return self._find_line(call) if self._changes else detached(self._eager.run(call))
        if self._calls[0] == self._second_call:
            self._find_names()
        with HeldSchedules().holding() if self.holds else nullcontext():
            returned = self._calls[0](call)
        del self._calls[0]
        return returned

    def _first_call(self, call: StepCall) -> Any:
        with self.participants.watching() as gradients:
            returned = self._eager.run(call)
        self._returned = (call.kind, constants_of(returned))
        distributed = [type(one).__name__ for one in self.participants.modules if _talks_to_other_ranks(one)]
        if distributed:
            self.finding = f"it runs {distributed[0]}, whose collectives are not captured"
        elif call.changed():
            self.finding = "it changes a list or a dict among its arguments, where a replay does nothing"
        return returned if self.finding else self._result(returned, gradients)

    def _result(self, returned: Any, gradients: Gradients) -> Any:
        """What the caller gets: as a replay would return it, or as it is where no replay can."""
        if gradients.may_go_back(tree_leaves(returned)):
            self.finding = BACKWARD_LATER
            return returned
        return detached(returned)

    def _find_names(self) -> None:
        step = self._eager.step
        if isinstance(step, BoundStep):
            self._names = StepNames(step.__wrapped__, self.participants.modules, step.named())
        else:
            self._names = StepNames(step, self.participants.modules)
        self.host = HostState(self.participants, self._names)
        self.written = WrittenTensors(self.participants, self.host)
        schedulers, words = self.participants.schedulers, self._names.words
        self.holds = bool(schedulers) and self.participants.schedules_step_last and may_be_held(schedulers, words)

    def _second_call(self, call: StepCall) -> Any:
        before, self._seen = self.host.read(), call.kind
        with self.participants.watching() as gradients, self.written.watching():
            returned = self._result(self.worth.time_eager(lambda: self._eager.run(call)), gradients)
        self._trained = [one.leaf for one in gradients.held()]  # before the loop clears what the step has left
        self._changes = changes_between(before, self.host.read())
        kind, first = self._returned
        second = constants_of(returned)
        if kind == call.kind and first != second:
            self.finding = f"it returned {first} first and {second} then, which no replay would renew"
        return returned

    def is_over(self, call: StepCall) -> bool:
        """Whether this call is the first that may be captured. Where `finding` says why not, it is none."""
        if self._calls or self._changes or not self.participants.have_state():
            return False
        seen, now = self._numbers, call.numbers()
        changing = [at for at in now if len({now[at], *(one.get(at) for one in seen)}) == len(seen) + 1]
        whole = next((now[at] for at in changing if type(now[at]) is int), None)
        if whole is not None:  # it may count or choose
            self.finding = f"the argument {whole!r} is another number at each call; pass it as a tensor"
            return False
        self.changing = frozenset(changing)
        self.rates = LearningRates(
            [*self.participants.optimizers], self.participants.sparse_weights(), bool(self.participants.scalers)
        )
        self.key = GraphKey(self.participants, self._names, self.rates)
        self.key.add(self._trained)
        kind, taken = call.kind, StepCall(*call.given, self.changing).kind
        self.kind = (*taken, *self.key.kind()) if self.changing or kind == self._seen else None
        return True

    def _find_line(self, call: StepCall) -> Any:
        """What changes once and not again was made when it was first needed, or by another thread."""
        traced, before = self._changes[0], self.host.read()
        tracer = LineTracer(self.host.reader(traced.key))
        with self.participants.watching() as gradients:
            returned = self._result(tracer.run(lambda: self._eager.run(call)), gradients)
        if self.finding:
            return returned
        again, known = changes_between(before, self.host.read()), {change.key for change in self._changes}
        if any(change.key == traced.key for change in again):
            self.finding = f"at {tracer.found} it {traced.why}" if tracer.found else f"it {traced.why}"
        else:
            self._changes, self._seen = [change for change in again if change.key in known], call.kind
        return returned


def _talks_to_other_ranks(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or hasattr(module, "set_requires_all_reduce")


def constants_of(returned: Any) -> list[Any]:
    """Numbers and texts that a step returns."""
    return [one for one in tree_flatten(returned)[0] if type(one) in PLAIN]


def detached(returned: Any) -> Any:
    """As a replay would return it: without the graph of its gradients."""
    leaves, spec = tree_flatten(returned)
    return tree_unflatten([one.detach() if isinstance(one, Tensor) else one for one in leaves], spec)


class StepGraphs:
    """The graphs of one step. A kind of call is eager at first, captured when it comes back, replayed from then on."""

    def __init__(
        self, eager: EagerStream, rehearsal: Rehearsal, tally: Counter[str], warn: Callable[[str], None]
    ) -> None:
        self._eager_stream, self._tally, self._warn = eager, tally, warn
        self._participants, self._rates, self._key = rehearsal.participants, rehearsal.rates, rehearsal.key
        self._host, self._written = rehearsal.host, rehearsal.written
        self._stream = torch.accelerator.current_stream()  # which is asked for quickly
        self._worth, self._holds, self._changing = rehearsal.worth, rehearsal.holds, rehearsal.changing
        self._schedules = HeldSchedules()
        self.is_decided = False
        """Whether replays are known to take less time."""
        self.finding = ""
        """Why calls are eager from here on. The call that showed it was made as written."""
        self._moves = 0
        self._counts_on_device = False
        """Whether optimizers do: from the first capture on. A step that is never captured is as it always was."""
        self._changed: dict[Any, set[StateKey]] = {}
        self._unsteady: Counter[Any] = Counter()
        self._forget()
        if rehearsal.kind is not None:
            self._capturable[rehearsal.kind] = True

    def _forget(self) -> None:
        self._key.renew()
        self._key.remember_places()
        self._captured: dict[Any, CapturedCall] = {}
        self._recent: tuple[CapturedCall, Any] | None = None
        self._capturable: dict[Any, bool | None] = {}
        self._full = False

    def run(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Raises Uncapturable, with nothing done, if no call of the step can be captured."""
        current = torch.accelerator.current_stream()
        if current != self._stream:  # all calls share memory, so a call from another stream waits for the one before
            current.wait_stream(self._stream)
            self._stream = current
        has_moved = self._key.has_moved()
        if self._rates.moved() or has_moved:
            self._forget()
            self._moves += has_moved
            if self._moves > GRAPHS_PER_STEP:
                raise Uncapturable("its weights, buffers or modules are others again and again; write to them in place")
        around = self._key.kind()
        if self._recent is not None and self._recent[1] == around:
            tensors = self._recent[0].pattern.tensors_of(given)
            if tensors is not None:
                return self._replay(self._recent[0], given, tensors)
        call = StepCall(given[0], given[1], self._changing)
        kind = (*call.kind, *around)
        captured = self._captured.get(kind)
        if captured is not None:
            self._recent = captured, around
            return self._replay(captured, given, call.tensors)
        match self._capturable.get(kind):
            case None:
                return self._with_schedules(lambda: self._first(call, kind))
            case True:
                return self._with_schedules(lambda: self._capture(call, kind))
        return self._eager(call)

    def run_timed(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """The same, as long as it is open whether replays are worth while."""
        before, began = self._tally["replayed"], time.perf_counter_ns()
        returned = self.run(given)
        if self._tally["replayed"] > before and self._worth.replayed(time.perf_counter_ns() - began):
            self.is_decided = True
            self.finding = self.finding or self._worth.finding()
        return returned

    def _replay(self, captured: CapturedCall, given: Any, tensors: list[Tensor]) -> Any:
        self._rates.send()
        captured.replays += 1
        if is_compared(captured.replays) or captured.is_doubted:
            return self._with_schedules(lambda: self._compare(captured, StepCall(given[0], given[1], self._changing)))
        self._tally["replayed"] += 1
        returned = captured.replay(tensors)
        for step in captured.schedules:
            step()
        return returned

    def _compare(self, captured: CapturedCall, call: StepCall) -> Any:
        try:
            returned, finding = replay_compared(
                captured,
                call,
                lambda one: detached(self._worth.time_eager(lambda: self._as_written(one))),
                self._written,
                self._host,
            )
        except torch.OutOfMemoryError:
            if captured.replays <= COMPARED_FIRST:
                raise Uncapturable("there is too little memory to compare a replay with an eager call") from None
            self._tally["replayed"] += 1
            self._schedules.steps = [*captured.schedules]
            return captured.replay(call.tensors)
        self._tally["eager" if finding else "compared"] += 1
        if captured.is_doubted:
            self.finding = finding
        captured.is_doubted = bool(finding)  # sums in no order may be far apart once: what is wrong is so again
        return returned

    def _with_schedules(self, run: Callable[[], Any]) -> Any:
        """They step once it is over, and the host's state has been compared."""
        if not self._holds:
            return run()
        self._schedules = HeldSchedules()
        with self._schedules.holding():
            return run()

    def release(self) -> None:
        """Optimizers as the user made them, and memory as it was."""
        self._rates.count_on_host()
        self._captured, self._recent = {}, None

    def _as_written(self, call: StepCall) -> Any:
        with self._rates.on_device():
            return self._eager_stream.run(call)

    def _eager(self, call: StepCall) -> Any:
        self._tally["eager"] += 1
        return self._as_written(call)

    def _first(self, call: StepCall, kind: Any) -> Any:
        if kind not in self._capturable and len(self._capturable) >= GRAPHS_PER_STEP:
            if not any(self._capturable.values()):
                raise Uncapturable(f"nearly every call is another: {self._new_in(call, kind)}")
            self._warn_full(call, kind)
            return self._eager(call)
        before = self._host.read()
        with self._participants.watching() as gradients, self._written.watching():
            returned = self._eager(call)
        if gradients.may_go_back(tree_leaves(returned)):
            self._capturable[kind] = False
            self._warn(f"eagerly for some arguments: {BACKWARD_LATER}")
            return returned
        changes, known = changes_between(before, self._host.read()), self._changed.get(kind, set())
        self._unsteady[kind] += bool(changes)
        again = next((change for change in changes if change.key in known), None)
        if not again and self._unsteady[kind] == UNSTEADY_CALLS:
            again = changes[0]
        if again:
            self._warn(f"eagerly for some arguments: it {again.why}")
        self._capturable[kind] = None if changes and not again else not again
        self._changed[kind] = {change.key for change in changes}
        self._key.add([one.leaf for one in gradients.held()])
        self._key.remember_places()
        return returned

    def _capture(self, call: StepCall, kind: Any) -> Any:
        if not self._counts_on_device:
            self._counts_on_device = True
            self._rates.count_on_device()
            for optimizer in self._participants.optimizers:
                warm_up(optimizer, self._eager_stream.stream)
        before = self._host.read()
        try:
            with self._rates.on_device(), self._written.watching(is_captured=True):
                captured = capture_call(call, self._eager_stream, self._participants, [before, *self._key.held()])
        except Uncapturable as reason:
            self._schedules.steps.clear()
            if not self._captured:
                raise
            self._capturable[kind] = False
            self._warn(f"eagerly for some arguments: {reason}")
            return self._eager(call)
        self._tally["captured"] += 1
        changes = changes_between(before, self._host.read())
        if changes:  # this once the graph does what its capture did on the host
            self.finding = f"it {changes[0].why}"
        else:
            captured.schedules = [*self._schedules.steps]
            self._captured[kind] = captured
        return captured.replay_filled(call.tensors)

    def _warn_full(self, call: StepCall, kind: Any) -> None:
        if not self._full:
            self._full = True
            self._warn(
                f"eagerly for further arguments: it keeps {GRAPHS_PER_STEP} graphs, and {self._new_in(call, kind)}"
            )

    def _new_in(self, call: StepCall, kind: Any) -> str:
        """What no call before had: as a rule a shape, or a setting that a schedule writes."""
        labels = [*call.labels(), *self._key.labels()]
        same_parts = [other for other in self._capturable if len(other) == len(kind)]
        if not same_parts:
            return "what it reads has grown; pass it tensors, and what stays the same"
        for place, label in enumerate(labels):
            if all(other[place] != kind[place] for other in same_parts):
                advice = "pad inputs to a few shapes" if "shape" in label else "keep it on the device, or constant"
                return f"{label} would need another; {advice}"
        return "a new mix of their arguments came"


def graph(step: Callable[P, R]) -> Graphed[P, R]:
    """The step, captured as a CUDA graph and replayed: one launch in place of many. Without CUDA, the step itself."""
    return Graphed(step)


class Graphed(Generic[P, R]):
    """Called like the step. What it returns is the caller's to keep: no later call changes it."""

    warns = True
    """Whether a warning says why calls are eager."""

    def __init__(self, step: Callable[P, R]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self.name = getattr(step, "__name__", type(step).__name__)
        self._why = ""
        self._tally: Counter[str] = Counter()
        self._bound: dict[Any, Graphed[..., Any]] = {}
        """The step with each of the objects that it was given."""
        self._call: Callable[..., Any] = self._first

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R:
        return self._call(*arguments, **options)

    @property
    def calls(self) -> int:
        return self._tally.total()

    @property
    def replays(self) -> int:
        """How many calls were replayed, those among them that were compared with an eager call."""
        return self._tally["replayed"] + self._tally["compared"]

    def report(self) -> str:
        """How its calls were run, and why not otherwise."""
        names = ("replayed", *["compared"] * bool(self._tally["compared"]), "captured", "eager")
        counts = ", ".join(f"{self._tally[name]} {name}" for name in names)
        why = next((one for one in (self._why, *(inner._why for inner in self._bound.values())) if one), "")
        return f"{self.name}: {counts}" + (f"; {why}" if why else "")

    def _first(self, *arguments: Any, **options: Any) -> Any:
        """Whether there is a GPU is asked when there is something to do."""
        self._arguments = BoundArguments(arguments, options)
        if not torch.cuda.is_available():
            self._call = self._eager
        elif self._arguments:
            self._call = self._with_bound
        else:
            self._eager_stream = EagerStream(self._step)
            self._rehearsal = Rehearsal(self._eager_stream)
            self._call = self._rehearse
        return self._call(*arguments, **options)

    def _with_bound(self, *arguments: Any, **options: Any) -> Any:
        """With other objects it is another step."""
        bound, inputs, rest = self._arguments.split(arguments, options)
        key = identity(bound)
        graphed = self._bound.get(key)
        if graphed is None:
            if len(self._bound) >= GRAPHS_PER_STEP:
                for one in self._bound.values():
                    one.release()
                self._bound.clear()
                self._give_up("it is given other objects again and again; pass it tensors, and what stays the same")
                return self._eager(*arguments, **options)
            graphed = self._bound[key] = Graphed(self._arguments.bind(self._step, arguments, options))
            graphed._tally = self._tally
        return graphed(*inputs, **rest)

    def _eager(self, *arguments: Any, **options: Any) -> Any:
        self._tally["eager"] += 1
        return self._step(*arguments, **options)

    def _rehearse(self, *arguments: Any, **options: Any) -> Any:
        if torch.is_inference_mode_enabled():  # its tensors could not be written to elsewhere
            return self._eager(*arguments, **options)
        rehearsal, call = self._rehearsal, StepCall(arguments, options)
        if rehearsal.is_over(call):
            self._graphs = StepGraphs(self._eager_stream, rehearsal, self._tally, self._warn)
            self._call = self._replay
            return self._replay(*arguments, **options)
        self._tally["eager"] += 1
        returned = rehearsal.run(call)
        if rehearsal.finding:
            self._give_up(rehearsal.finding)
        return returned

    def _replay(self, *arguments: Any, **options: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return self._eager(*arguments, **options)
        graphs = self._graphs
        try:
            returned = (graphs.run if graphs.is_decided else graphs.run_timed)((arguments, options))
        except Uncapturable as reason:
            self.release()
            self._give_up(str(reason))
            return self._eager(*arguments, **options)
        if graphs.finding:
            self.release()
            self._give_up(graphs.finding)
        return returned

    def release(self) -> None:
        """Further calls are eager, and the optimizers as the user made them."""
        if self._call == self._replay:
            self._graphs.release()
        self._call = self._eager

    def _give_up(self, reason: str) -> None:
        self._warn(f"eagerly: {reason}")
        self._call = self._eager

    def _warn(self, what: str) -> None:
        self._why = f"keepbusy.graph runs {self.name} {what}"
        if self.warns:
            warnings.warn(self._why, stacklevel=depth_of_user())


class LearningRates:
    """Optimizers as a graph can hold them: they count on the device, and a learning rate that moves is read there.

    A Python float is baked into the graph, and a schedule would change nothing. So from its first change on a rate is a
    tensor on the device while the step runs; between steps the group holds what it held, and what a schedule wrote
    there is sent over before the replay. A rate that never changes stays the constant that it is, and its steps the
    same to the bit; so does the rate of an optimizer that takes no tensor for one.
    """

    def __init__(self, optimizers: list[Optimizer], sparse: Collection[int] = (), is_scaled: bool = False) -> None:
        """`sparse`: weights, by their identity, that get sparse gradients, for which no step is fused. `is_scaled`:
        whether a GradScaler takes part, which asks the device whether to step, unless the step is fused."""
        self._scaled = [one for one in optimizers if is_scaled and _all_may_be_fused(one, sparse)]
        self._counting = [one for one in optimizers if "capturable" in one.defaults]
        self._uncapturable = [group for one in self._counting for group in one.param_groups if not group["capturable"]]
        self._rates: list[_LearningRate] = []
        for one in optimizers:
            for group in one.param_groups:
                if one in self._scaled:
                    self._rates.append(_ScaledRate(group))
                elif _may_be_tensor(one, group):
                    self._rates.append(_LearningRate(group))
                elif type(one) is torch.optim.SGD and _may_be_fused(group, sparse):
                    self._rates.append(_FusedRate(group))

    def count_on_device(self) -> None:
        """Switch the optimizers to PyTorch's `capturable` path."""
        for group in self._uncapturable:
            group["capturable"] = True
        for optimizer in self._counting:
            _move_counts(optimizer, to_device=True)
            optimizer._warned_capturable_if_run_uncaptured = True

    def count_on_host(self) -> None:
        """As it was before."""
        for group in self._uncapturable:
            group["capturable"] = False
        for optimizer in self._counting:
            if not all(group["capturable"] or group.get("fused") for group in optimizer.param_groups):
                _move_counts(optimizer, to_device=False)

    def moved(self) -> bool:
        """Whether some rate has changed for the first time: graphs so far hold it as a constant."""
        beginning = [rate for rate in self._rates if rate.begins_to_move()]  # each of them is asked
        return bool(beginning)

    def send(self) -> None:
        """What the host has written since the last step."""
        for rate in self._moving():
            rate.send()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Meanwhile the optimizers find their rates there."""
        self.send()
        moving: list[_LearningRate] = [rate for rate in self._rates if rate.is_other_on_device]
        for rate in moving:
            rate.group |= rate.on_device()
        for optimizer in self._scaled:
            vars(optimizer)["_step_supports_amp_scaling"] = True
        try:
            yield
        finally:
            for rate in moving:
                rate.group |= rate.on_host()
            for optimizer in self._scaled:
                vars(optimizer).pop("_step_supports_amp_scaling", None)

    def of_its_own(self, group: dict[str, Any]) -> dict[str, Any]:
        """Settings of the group that no graph keeps: where it counts, and a rate that is sent over."""
        is_sent = any(rate.group is group for rate in self._moving())
        where = dict.fromkeys(("capturable", "fused", "foreach"))
        return where | {"lr": None} if is_sent else where

    def _moving(self) -> list[_LearningRate]:
        return [rate for rate in self._rates if rate.sent is not None]


class _LearningRate:
    """A group's learning rate as its owner wrote it, and from its first change on as it was sent."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self.written = group, group["lr"]
        self._value = float(self.written)
        self.sent: torch.Tensor | None = None

    @property
    def is_other_on_device(self) -> bool:
        return self.sent is not None

    def begins_to_move(self) -> bool:
        if self.sent is not None or float(self.group["lr"]) == self._value:
            return False
        self.sent = torch.full((), self._value, dtype=torch.float32, device=self.group["params"][0].device)
        return True

    def on_device(self) -> dict[str, Any]:
        """Settings of the group while the step runs."""
        return {"lr": self.sent}

    def on_host(self) -> dict[str, Any]:
        """And as its owner wrote them."""
        return {"lr": self.written}

    def send(self) -> None:
        self.written = self.group["lr"]
        value = float(self.written)
        if value != self._value and self.sent is not None:
            self._value = value
            self.sent.fill_(value)


class _FusedRate(_LearningRate):
    """Of plain SGD, which takes a tensor for its rate only where its step is fused."""

    def on_device(self) -> dict[str, Any]:
        return super().on_device() | {"fused": True}

    def on_host(self) -> dict[str, Any]:
        return super().on_host() | {"fused": self._was_fused}

    def begins_to_move(self) -> bool:
        self._was_fused = self.group["fused"]
        return super().begins_to_move()


class _ScaledRate(_LearningRate):
    """Of an optimizer that a GradScaler steps: fused, it leaves out a step by itself where gradients overflowed."""

    is_other_on_device = True

    def on_device(self) -> dict[str, Any]:
        moved = super().on_device() if self.sent is not None else {}
        return moved | {"fused": True, "foreach": False}

    def on_host(self) -> dict[str, Any]:
        moved = super().on_host() if self.sent is not None else {}
        return moved | self._chosen

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self._chosen = {name: group[name] for name in ("fused", "foreach")}


def warm_up(optimizer: Optimizer, stream: torch.cuda.Stream) -> None:
    """Loads what its step runs on the device, by a step of a twin that nobody sees: a capture is no time for that."""
    kind: Any = type(optimizer)
    if "capturable" not in optimizer.defaults or not kind.__module__.startswith("torch.optim"):
        return
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))
    twin.param_groups, twin.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        alike = {one.dtype: one for one in group["params"] if one.is_cuda}.values()
        weights = [torch.zeros(2, dtype=one.dtype, device=one.device, requires_grad=True) for one in alike]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        twin.param_groups.append(group | {"params": weights})
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), suppress(Exception):  # a capture that fails then says so itself
        getattr(kind.step, "__wrapped__", kind.step)(twin)  # without hooks
    torch.cuda.current_stream().wait_stream(stream)


def _all_may_be_fused(optimizer: Optimizer, sparse: Collection[int]) -> bool:
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return type(optimizer) in kinds and all(_may_be_fused(group, sparse) for group in optimizer.param_groups)


def _may_be_fused(group: dict[str, Any], sparse: Collection[int]) -> bool:
    """Where nobody chose another implementation, and its gradients are dense."""
    chosen = group.get("fused") or group.get("foreach") or group.get("differentiable") or group.get("maximize")
    parameters = group["params"]
    plain = all(one.is_cuda and torch.is_floating_point(one) and id(one) not in sparse for one in parameters)
    return not chosen and plain and not isinstance(group["lr"], Tensor)


def _may_be_tensor(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """A rate that is a tensor on the device already needs nothing."""
    rate = group["lr"]
    on_device = isinstance(rate, torch.Tensor) and rate.is_cuda
    return not on_device and ("capturable" in optimizer.defaults or bool(group.get("fused")))


_COUNTS = ("step", "mu_product", "eta", "mu")
"""What PyTorch's optimizers count: numbers, whatever the shape of the weight."""


def _move_counts(optimizer: Optimizer, to_device: bool) -> None:
    for parameter, state in optimizer.state.items():
        for label in [label for label in _COUNTS if isinstance(state.get(label), Tensor)]:
            if state[label].is_cuda != to_device:
                state[label] = state[label].to(parameter.device if to_device else "cpu")
