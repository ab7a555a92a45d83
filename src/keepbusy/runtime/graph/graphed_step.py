"""`graph`: a training step captured once as a CUDA graph, and replayed from then on.

    step = keepbusy.graph(train_step)
    for batch in loader:
        losses.append(step(batch))

The step may be all of it (forward, backward, optimizer) or forward and backward alone. Its first calls are eager and
count like any other. A step that cannot be captured runs eagerly for good, and one warning names the line.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Set
from contextlib import nullcontext
from itertools import chain
from types import CodeType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from keepbusy.runtime.graph.bound_step import BoundArguments, BoundStep, identity
from keepbusy.runtime.graph.captured_call import (
    HOOKS_ON_WEIGHTS,
    HOST_COPY,
    LEGACY_STREAM,
    CapturedCall,
    EagerStream,
    StepCall,
    Uncapturable,
    capture_call,
    is_within_another,
    renew_gradient_nodes,
    without_argument_checks,
)
from keepbusy.runtime.graph.host_state import (
    BoundAnew,
    HostChange,
    HostState,
    StateKey,
    bound_anew,
    changes_between,
    settings,
)
from keepbusy.runtime.graph.learning_rates import LearningRates, warm_up
from keepbusy.runtime.graph.module_state import ModuleState, read_by_class
from keepbusy.runtime.graph.named_values import NamedValues
from keepbusy.runtime.graph.names_read import PLAIN, StepNames, constant, is_a
from keepbusy.runtime.graph.participants import (
    Gradients,
    HeldGradient,
    HeldSchedules,
    Participants,
    is_weight,
    may_be_held,
)
from keepbusy.runtime.graph.reachable import exchange_memory, is_alone
from keepbusy.runtime.graph.replay_check import (
    COMPARED_FIRST,
    StepState,
    WrittenTensors,
    gradients_compared,
    is_compared,
    replay_compared,
)
from keepbusy.runtime.graph.user_lines import LaunchedLines, LineTracer, code_of, depth_of_user
from keepbusy.runtime.graph_of_modules import CalledModules, GraphedModules, meets_other_ranks
from keepbusy.runtime.host_constants import CapturedConstants, ConstantReads
from keepbusy.runtime.module_parts import submodules
from keepbusy.runtime.tensor_kinds import flatten_result
from keepbusy.torch_names.pytorch import tree_leaves, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")
GRAPHS_PER_STEP = 8
"""So many kinds of call (shapes, constants, modes) may get a graph; each has the memory of a step of its own."""
PAYS_AFTER = 32
"""Replays of a graph, for its capture and its first comparisons: these take as long as some twenty calls."""
MOST_IN_VAIN = 3
"""So many sets of objects may get graphs and give way to others before these pay, as a closure for each batch does."""
UNSTEADY_CALLS = 4
"""So many calls of a kind may change something on the host that none before them changed."""
BOUND_TO_OTHERS = "what it binds anew has another shape now"
_AGAIN = object()
"""In the kind of a call: the graph of its kind is awaited, so it takes another."""


class _KeptSettings(NamedTuple):
    """The settings of a parameter group that a graph keeps, and how to read them now."""

    group: dict[str, Any]
    size: int
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]


class GraphKey:
    """What besides its arguments decides what a step does: modes, settings, what it reads, where its weights lie.

    All of it is constant in a graph. So it is read before each replay, and another graph is taken where it differs.
    Mostly nothing differs, and then `is_as_remembered` says so without making anything anew.
    """

    def __init__(self, participants: Participants, names: StepNames, rates: LearningRates) -> None:
        self._participants, self._optimizers, self._rates = participants, [*participants.optimizers], rates
        self._named, self._words = NamedValues(names), names.words
        self._leaves: dict[int, Tensor] = {}
        self._remembered: tuple[Any, ...] | None = None
        self.renew()

    def renew(self) -> None:
        """The modules that there are now."""
        modules = submodules([*self._participants.modules, *self._named.modules()])
        self._of_modules = ModuleState(modules, self._is_read)
        of_modules = {id(tensor) for tensor in self._of_modules.tensors()}
        self._others = [leaf for leaf in self._leaves.values() if id(leaf) not in of_modules]

    def _is_read(self, module: torch.nn.Module, name: str) -> bool:
        kind: Any = type(module)
        return name in self._words or name in read_by_class(kind)

    def add(self, leaves: list[Tensor]) -> None:
        """Tensors that gather gradients in the step."""
        self._leaves |= {id(leaf): leaf for leaf in leaves}
        self._remembered = None
        self.renew()

    def forget(self, past: Set[int]) -> None:
        """Tensors that are in use no more, by their identity."""
        self._leaves = {key: leaf for key, leaf in self._leaves.items() if key not in past}

    def _modes(self) -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            self._of_modules.numbers(),
        )

    def kind(self) -> tuple[Any, ...]:
        """What may come back: an evaluation in between, gradients that were cleared, another setting."""
        try:
            modes = self._modes()
        except KeyError:  # a number of a module is gone
            self.renew()
            modes = self._modes()
        groups, self._gradients = self._groups(), [leaf.grad for leaf in self._leaves.values()]
        cleared = tuple([gradient is None for gradient in self._gradients])
        kind = (
            *modes,
            cleared,
            *[settings(group | self._rates.of_its_own(group)) for group in groups],
            *self._named.read(),
        )
        in_groups = [value for group in groups for value in group.values() if isinstance(value, Tensor)]
        self._tensors = [*self._named.tensors(), *in_groups]
        self._remembered = modes, [*map(constant, self._tensors)], [*map(self._kept_settings, groups)]
        return kind

    def named(self) -> list[Any]:
        """What the step's names stand for, of which the end of `kind` tells."""
        return self._named.found()

    def has_in_place(self, gradients: list[HeldGradient]) -> bool:
        """Whether each tensor had the gradient that it has after a replay."""
        found = dict(zip(self._leaves, self._gradients, strict=True))
        return all(found.get(id(held.leaf), self) is held.exit for held in gradients)

    def _groups(self) -> list[dict[str, Any]]:
        return [*chain.from_iterable([optimizer.param_groups for optimizer in self._optimizers])]

    def _kept_settings(self, group: dict[str, Any]) -> _KeptSettings:
        """All that a graph keeps, which a learning rate that is sent over is not."""
        names = [name for name in group if name != "lr" or not self._rates.is_sent(group)]
        read = operator.itemgetter(*names)
        return _KeptSettings(group, len(group), read, read(group))

    def is_as_remembered(self) -> bool:
        """Whether nothing has moved, and `kind` is what it was when it was asked for last."""
        if self._remembered is None or self.has_moved():
            return False
        for leaf, gradient in zip(self._leaves.values(), self._gradients, strict=True):
            if leaf.grad is not gradient:
                return False
        modes, constants, settings_of_groups = self._remembered
        groups = self._groups()
        try:
            if self._modes() != modes or len(groups) != len(settings_of_groups):
                return False
            for group, kept in zip(groups, settings_of_groups, strict=True):
                if group is not kept.group or len(group) != kept.size:
                    return False
                if not all(map(operator.is_, kept.read(group), kept.values)):
                    return False
        except KeyError:  # a setting is gone, or a number of a module
            return False
        return self._named.is_as_read() and [*map(constant, self._tensors)] == constants

    def remember_places(self) -> None:
        """Where weights and optimizer state lie."""
        self._of_modules.remember()
        self._places = self._of_others()

    def has_moved(self) -> bool:
        """When any of them has, no graph is of use any more."""
        return not self._of_modules.is_as_remembered() or self._of_others() != self._places

    def _of_others(self) -> list[int]:
        return [leaf.data_ptr() for leaf in self._others] + [id(optimizer.state) for optimizer in self._optimizers]

    def held(self) -> list[Any]:
        """What a graph may read without owning it, to be kept alive for it."""
        return [*self._named.held(), *[optimizer.state for optimizer in self._optimizers]]

    def labels(self) -> list[str]:
        """What a person calls the parts of `kind`."""
        groups = [settings_of(optimizer) for optimizer in self._optimizers for _ in optimizer.param_groups]
        modes = ["whether gradients are on", "autocast", "a mode or a number of a module"]
        return [*modes, "which gradients are cleared", *groups, *self._named.labels()]


def settings_of(optimizer: Optimizer) -> str:
    return f"the settings of {type(optimizer).__name__}"


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

    1. Libraries load, optimizers make their state; modules and optimizers become known.
    2. The host's state is read before and after. What differs, a replay would leave undone.
    3. If something differed, the step is traced to find the line. If not, it is captured from here on.

    Results are like those of a replay: without the graph of their gradients, unless the backward pass comes later.
    `finding` says why the step cannot be captured, once that is known.
    """

    def __init__(self, eager: EagerStream) -> None:
        self.participants, self.finding = Participants(code_of(eager.step)), ""
        self.line = 0
        """Of the step, where it does what is found; 0 where that is not known."""
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
        if self._eager.bound is not None and not self._eager.bound.fits():
            self.finding, self._eager.bound = BOUND_TO_OTHERS, None
            return self._eagerly(call)
        with self._eager.kept_in_place():
            return self._run(call)

    def _run(self, call: StepCall) -> Any:
        self._numbers = [*self._numbers[-2:], call.numbers()]
        if not self._calls:
            return self._find_line(call) if self._changes else self._eagerly(call)
        if self._calls[0] == self._second_call:
            self._find_names()
        with HeldSchedules().holding() if self.holds else nullcontext():
            returned = self._calls[0](call)
        del self._calls[0]
        return returned

    def _first_call(self, call: StepCall) -> Any:
        places = call.places()
        returned = self._eagerly(call)
        self._returned = (call.kind, constants_of(returned))
        distributed = [type(module).__name__ for module in self.participants.modules if meets_other_ranks(module)]
        if distributed:
            self.finding = f"it runs {distributed[0]}, whose collectives are not captured"
        elif call.changed():
            self.finding = "it changes a list or a dict among its arguments, where a replay does nothing"
        elif call.places() != places:
            self.finding = (
                "it binds an argument to new memory, where a replay goes on with the old; write to it in place"
            )
        return returned

    def _eagerly(self, call: StepCall) -> Any:
        with self.participants.watching() as gradients:
            return as_replayed(self._eager.run(call), gradients)

    def _find_names(self) -> None:
        step = self._eager.step
        if isinstance(step, BoundStep):
            self._names = StepNames(step.__wrapped__, self.participants.modules, step.named())
        else:
            self._names = StepNames(step, self.participants.modules)
        self.host = HostState(self.participants, self._names)
        self.participants.add_weights(value for _, value in self.host.reached())
        self.written = WrittenTensors(self.participants, self.host)
        schedulers, words = self.participants.schedulers, self._names.words
        self.holds = bool(schedulers) and self.participants.schedules_step_last and may_be_held(schedulers, words)

    def _second_call(self, call: StepCall) -> Any:
        before, self._seen = self.host.read(), call.kind
        with self.participants.watching() as gradients, self.written.watching():
            returned = as_replayed(self.worth.time_eager(lambda: self._eager.run(call)), gradients)
        # before the loop clears what the step has left
        self._trained = [gradient.leaf for gradient in gradients.held()]
        after = self.host.read()
        self._changes = changes_between(before, after)
        places = bound_anew(self.host, before, after) if self._changes and self._eager.bound is None else []
        if places and not gradients.may_go_back([bound.read() for bound in places if not bound.is_made_by_a_hook()]):
            self._eager.bound, self._changes = BoundAnew(places), []
            self._calls.append(self._second_call)  # which shows whether that was all
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
        changing = [
            place for place in now if len({now[place], *(earlier.get(place) for earlier in seen)}) == len(seen) + 1
        ]
        whole = next((now[place] for place in changing if type(now[place]) is int), None)
        if whole is not None:  # it may count or choose
            self.finding = f"the argument {whole!r} is another number at each call; pass it as a tensor"
            return False
        self.changing = frozenset(changing)
        self.rates = LearningRates(
            [*self.participants.optimizers], self.participants.sparse_weights(), bool(self.participants.scalers)
        )
        self.key = GraphKey(self.participants, self._names, self.rates)
        self.key.add(self._trained)
        kind, taken_in = call.kind, StepCall(*call.given, self.changing).kind
        self.kind = (*taken_in, *self.key.kind()) if self.changing or kind == self._seen else None
        return True

    def _find_line(self, call: StepCall) -> Any:
        """What changes once and not again was made when it was first needed, or by another thread."""
        traced, before = self._changes[0], self.host.read()
        tracer = LineTracer(self.host.reader(traced.key), code_of(self._eager.step))
        with self.participants.watching() as gradients:
            returned = as_replayed(tracer.run(lambda: self._eager.run(call)), gradients)
        repeated, known = changes_between(before, self.host.read()), {change.key for change in self._changes}
        if any(change.key == traced.key for change in repeated):
            self.finding = f"at {tracer.found} it {traced.why}" if tracer.found else f"it {traced.why}"
            self.line = tracer.line_of_step
        else:
            self._changes, self._seen = [change for change in repeated if change.key in known], call.kind
        return returned


def constants_of(returned: Any) -> list[Any]:
    """Numbers and texts that a step returns."""
    return [leaf for leaf in flatten_result(returned)[0] if type(leaf) in PLAIN]


def as_replayed(returned: Any, gradients: Gradients) -> Any:
    """As a replay would return it: without the graph of its gradients, unless a backward pass may still need that."""
    return returned if gradients.may_go_back(flatten_result(returned)[0]) else detached(returned)


def detached(returned: Any) -> Any:
    leaves, spec = flatten_result(returned)
    made = [leaf.detach() if isinstance(leaf, Tensor) and not is_weight(leaf) else leaf for leaf in leaves]
    return tree_unflatten(made, spec)


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
        self._recent: CapturedCall | None = None
        """What was replayed when the key was read last."""
        self._is_in_place = False
        """Whether gradients stood then where it leaves them."""
        self._capturable: dict[Any, bool | None] = {}
        self._full = False
        self._reads: dict[Any, ConstantReads] = {}

    def run(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Raises Uncapturable, with nothing done, if no call of the step can be captured."""
        bound = self._eager_stream.bound
        if bound is None:
            return self._run(given)
        if not bound.fits():
            raise Uncapturable(BOUND_TO_OTHERS)
        with bound.kept_in_place():
            return self._run(given)

    def _run(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        current = torch.accelerator.current_stream()
        if current != self._stream:  # all calls share memory, so a call from another stream waits for the one before
            current.wait_stream(self._stream)
            self._stream = current
        if self._recent is not None and not self._recent.is_awaited() and self._key.is_as_remembered():
            tensors = self._recent.pattern.tensors_of(given)
            if tensors is not None:
                return self._replay(self._recent, given, tensors, self._is_in_place)
        has_moved = self._key.has_moved()
        if self._rates.moved() or has_moved:
            self._forget()
            self._moves += has_moved
            if self._moves > GRAPHS_PER_STEP:
                raise Uncapturable("its weights, buffers or modules are others again and again; write to them in place")
        call = StepCall(given[0], given[1], self._changing)
        kind = (*call.kind, *self._key.kind())
        if kind not in self._capturable and self._is_brought_back(kind):
            kind = (*call.kind, *self._key.kind())
        captured = self._captured.get(kind)
        while captured is not None and captured.is_awaited():
            kind = (*kind, _AGAIN)
            captured = self._captured.get(kind)
        self._recent = captured
        if captured is not None:
            self._is_in_place = self._key.has_in_place(captured.gradients)
            return self._replay(captured, given, call.tensors, self._is_in_place)
        match self._capturable.get(kind):
            case None:
                return self._with_schedules(lambda: self._first(call, kind))
            case True:
                return self._with_schedules(lambda: self._capture(call, kind))
        return self._eager(call)

    def _is_brought_back(self, kind: tuple[Any, ...]) -> bool:
        """Where all that is new is that names stand for other tensors of the same shapes, as for caches that are made
        anew, these take the memory that a graph reads, and the former ones theirs. Nobody else may use either."""
        named = self._key.named()
        for known, captured in self._captured.items():
            first = len(kind) - len(named)
            if len(known) != len(kind) or known[:first] != kind[:first]:
                continue
            pairs = [
                (old, new)
                for old, new, part, other in zip(captured.read, named, known[first:], kind[first:], strict=True)
                if part != other
            ]
            is_each_its_own = len({id(new) for _, new in pairs}) == len(pairs)
            if is_each_its_own and all(_may_exchange(old, new, named) for old, new in pairs):
                for old, new in pairs:
                    exchange_memory(old, new)
                    self._written.stands_for(old, new)
                captured.read = named
                return True
        return False

    def run_timed(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """The same, as long as it is open whether replays are worth while."""
        before, began = self._tally["replayed"], time.perf_counter_ns()
        returned = self.run(given)
        if self._tally["replayed"] > before and self._worth.replayed(time.perf_counter_ns() - began):
            self.is_decided = True
            self.finding = self.finding or self._worth.finding()
        return returned

    def _replay(self, captured: CapturedCall, given: Any, tensors: list[Tensor], is_in_place: bool) -> Any:
        self._rates.send()
        captured.replays += 1
        later = captured.later
        if later is not None and (later.finding or later.has_hooks()):
            raise Uncapturable(later.finding or HOOKS_ON_WEIGHTS)
        if is_compared(captured.replays) or captured.is_doubted or (later is not None and later.is_doubted):
            return self._with_schedules(lambda: self._compare(captured, StepCall(given[0], given[1], self._changing)))
        self._tally["replayed"] += 1
        if later is not None:
            return captured.replay_before_backward(tensors, self._made_again(given))
        returned = captured.replay(tensors, is_in_place)
        for step in captured.schedules:
            step()
        return returned

    def _compare(self, captured: CapturedCall, call: StepCall) -> Any:
        def eagerly(repeated: StepCall) -> Any:
            returned = self._worth.time_eager(lambda: self._as_written(repeated))
            return returned if captured.later is not None else detached(returned)

        made = call if captured.later is None else call.apart()
        try:
            returned, finding = replay_compared(captured, made, eagerly, self._written, self._host)
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
        if captured.later is None or finding:
            return returned
        labels = {id(tensor): label for label, tensor in self._written.split()[0]}
        return gradients_compared(captured.later, returned, made, call.tensors, labels)

    def _with_schedules(self, run: Callable[[], Any]) -> Any:
        """They step once it is over, and the host's state has been compared."""
        if not self._holds:
            return run()
        self._schedules = HeldSchedules()
        with self._schedules.holding():
            return run()

    def replays(self) -> int:
        return sum(captured.replays for captured in self._captured.values())

    def release(self) -> None:
        """Optimizers as the user made them, and memory as it was."""
        self._rates.count_on_host()
        self._captured, self._recent = {}, None

    def _made_again(self, given: Any) -> Callable[[], tuple[Any, list[Tensor]]]:
        """Runs a call once more from the random numbers that there are now, and leaves no other trace."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random = generator.get_state()

        def run() -> tuple[Any, list[Tensor]]:
            state = self._state()
            generator.set_state(random)
            try:
                with torch.enable_grad():
                    call = StepCall(given[0], given[1], self._changing).apart()
                    return self._as_written(call), call.tensors
            finally:
                state.restore()

        return run

    def _as_written(self, call: StepCall) -> Any:
        with self._rates.on_device():
            return self._eager_stream.run(call)

    def _eager(self, call: StepCall) -> Any:
        self._tally["eager"] += 1
        return self._as_written(call)

    def _first(self, call: StepCall, kind: Any) -> Any:
        if kind not in self._capturable and len(self._capturable) >= GRAPHS_PER_STEP:
            if self._starts_again():
                return self._first(call, (*call.kind, *self._key.kind()))
            if self._takes_in_more(call, kind):
                return self._eager(call)
            new = self._new_in(call, kind)
            if not any(self._capturable.values()):
                raise Uncapturable(f"nearly every call is another: {new}")
            reason = f"it keeps {GRAPHS_PER_STEP} graphs, and {new}"
            for optimizer, line in self._participants.optimizers.items():
                if new.startswith(settings_of(optimizer)) and line:
                    raise Uncapturable(reason, line)
            if not self._full:
                self._full = True
                self._warn(f"eagerly for further arguments: {reason}")
            return self._eager(call)
        before = self._host.read()
        with self._participants.watching() as gradients, self._written.watching():
            returned = as_replayed(self._eager(call), gradients)
        changes, known = changes_between(before, self._host.read()), self._changed.get(kind, set())
        self._unsteady[kind] += bool(changes)
        repeated = next((change for change in changes if change.key in known), None)
        if not repeated and self._unsteady[kind] == UNSTEADY_CALLS:
            repeated = changes[0]
        if repeated:
            self._warn(f"eagerly for some arguments: it {repeated.why}")
        self._capturable[kind] = None if changes and not repeated else not repeated
        self._changed[kind] = {change.key for change in changes}
        self._key.add([gradient.leaf for gradient in gradients.held()])
        self._key.remember_places()
        return returned

    def _starts_again(self) -> bool:
        """Whether all graphs read tensors that no name stands for any more, as points that are drawn anew now and then,
        and have been worth their captures: then they are forgotten."""
        named = self._key.named()
        graphs = self._captured.values()
        are_past = all(
            any(is_a(old, Tensor) and old is not new for old, new in zip(captured.read, named, strict=False))
            for captured in graphs
        )
        if not graphs or not are_past or self._tally["replayed"] < PAYS_AFTER * self._tally["captured"]:
            return False
        past = {id(old) for captured in graphs for old in captured.read} - {*map(id, named)}
        self._participants.forget(past)
        self._key.forget(past)
        self._forget()
        return True

    def _takes_in_more(self, call: StepCall, kind: Any) -> bool:
        """Whether graphs take in floats from here on of which they kept a value each: nothing else is new."""
        places = {1 + place: place for place, number in call.numbers().items() if type(number) is float}
        more = set[int]()
        for known in (kind_seen for kind_seen in self._capturable if len(kind_seen) == len(kind)):
            new = {place for place, (part, other) in enumerate(zip(kind, known, strict=True)) if part != other}
            more |= {places[place] for place in new} if new <= places.keys() else set()
        if more:
            self._changing |= more
            self._forget()
        return bool(more)

    def _capture(self, call: StepCall, kind: Any) -> Any:
        if not self._counts_on_device:
            self._counts_on_device = True
            self._rates.count_on_device()
            for optimizer in self._participants.optimizers:
                warm_up(optimizer, self._eager_stream.stream)
        before = self._host.read()
        try:
            captured = self._captured_once(call, [before, *self._key.held()], kind)
        except Uncapturable as reason:
            self._schedules.steps.clear()
            if HOST_COPY in str(reason) and kind not in self._reads:
                return self._find_reads(call, kind, reason)
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
            captured.schedules, captured.read = [*self._schedules.steps], self._key.named()
            self._captured[kind] = captured
        if captured.later is not None:
            return captured.replay_before_backward(call.tensors, self._made_again(call.given))
        return captured.replay_filled(call.tensors)

    def _find_reads(self, call: StepCall, kind: Any, reason: Uncapturable) -> Any:
        """One more call as it always was, in which is found what the host reads of constants; then another capture may
        succeed."""
        self._reads[kind] = reads = ConstantReads(reason)
        run = self._as_written
        if not self._captured:
            self._rates.count_on_host()
            self._counts_on_device, run = False, self._eager_stream.run
        self._tally["eager"] += 1
        try:
            state = self._state()
        except torch.OutOfMemoryError:
            return run(call)
        try:
            with CapturedConstants(reads):
                return run(call)
        except Exception:  # it may be that it cannot run while everything is watched
            reads.results.clear()
            state.restore()
        return run(call)

    def _state(self) -> StepState:
        return StepState([tensor for _, tensor in self._written.split()[0]], self._written.leaves())

    def _captured_once(self, call: StepCall, alive: list[Any], kind: Any) -> CapturedCall:
        """What some steps alone need is done where a capture has failed for the lack of it."""
        reads = self._reads.get(kind)
        if reads is not None and reads.reason is not None and not reads.results:
            raise reads.reason
        with self._rates.on_device(), self._written.watching(is_captured=True):
            capture = functools.partial(capture_call, call, self._eager_stream, self._participants, alive)
            if reads is not None:
                return capture(reads.known())
            try:
                return capture()
            except Uncapturable as reason:
                is_of_stream, has_constants = LEGACY_STREAM in str(reason), HOST_COPY in str(reason)
                if not (is_of_stream or has_constants):
                    raise
            if is_of_stream:
                renew_gradient_nodes(self._participants.gathering())
            return capture(ConstantReads().known() if has_constants else None)

    def _new_in(self, call: StepCall, kind: Any) -> str:
        """What no call before had: as a rule a shape, or a setting that a schedule writes."""
        if kind[-1] is _AGAIN:
            return "a backward pass through each of them may still come"
        labels = [*call.labels(), *self._key.labels()]
        same_parts = [other for other in self._capturable if len(other) == len(kind)]
        if not same_parts:
            return "what it reads has grown; pass it tensors, and what stays the same"
        for place, label in enumerate(labels):
            if all(other[place] != kind[place] for other in same_parts):
                advice = "pad inputs to a few shapes" if "shape" in label else "keep it on the device, or constant"
                return f"{label} would need another; {advice}"
        return "a new mix of their arguments was given"


def _may_exchange(old: Any, new: Any, named: list[Any]) -> bool:
    if not (is_a(old, Tensor) and is_a(new, Tensor)) or any(value is old for value in named):
        return False
    alike = (old.shape, old.dtype, old.device, old.layout) == (new.shape, new.dtype, new.device, new.layout)
    return alike and old.is_contiguous() and new.is_contiguous() and is_alone(old) and is_alone(new)


def graph(step: Callable[P, R]) -> Graphed[P, R]:
    """The step, captured as a CUDA graph and replayed: one launch in place of many. Without CUDA, the step itself."""
    return Graphed(step)


class DividedStep(NamedTuple):
    """A step that calls parts of itself, which are graphed, and runs what stands between them."""

    run: Callable[..., Any]
    graphed: list[Graphed[..., Any]]


class Graphed(Generic[P, R]):
    """Called like the step. What it returns is the caller's to keep: no later call changes it."""

    warns = True
    """Whether a warning says why calls are eager."""
    divide: Callable[[Callable[..., Any], LaunchedLines], DividedStep | None] | None = None
    """Makes the step one that is captured in parts, where it cannot be captured whole."""
    whole: Graphed[..., Any] | None = None
    """The step that this is a part of."""
    instead: Callable[[], None] | None = None
    """What is done once it is known that it cannot be captured."""

    def __init__(self, step: Callable[P, R]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self.name = getattr(step, "__name__", type(step).__name__)
        self._why = ""
        self._tally: Counter[str] = Counter()
        self._bound: dict[Any, Graphed[..., Any]] = {}
        """The step with each of the objects that it was given."""
        self._recent_bound: tuple[list[Any], Any] = ([], None)
        self._parts: DividedStep | None = None
        self._modules: GraphedModules | None = None
        self._staying = set[int]()
        """Lines that no part may hold."""
        self._call: Callable[..., Any] = self._first

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R:
        if is_within_another():
            return self._step(*arguments, **options)
        return self._call(*arguments, **options)

    @property
    def calls(self) -> int:
        return self._tally.total()

    @property
    def replays(self) -> int:
        """How many calls were replayed, those among them that were compared with an eager call."""
        of_parts = max((part.replays for part in self._all_parts()), default=0)
        return self._tally["replayed"] + self._tally["compared"] + of_parts

    def _all_parts(self) -> list[Graphed[..., Any]]:
        """Those that its calls with other objects have been divided into among them."""
        steps: list[Graphed[..., Any]] = [self, *self._bound.values()]
        parts = [part for step in steps if step._parts is not None for part in step._parts.graphed]
        modules = [made for step in steps if step._modules is not None for made in step._modules.graphed]
        return parts + [made for made in modules if made.calls]

    def report(self) -> str:
        """How its calls were run, and why not otherwise."""
        names = ("replayed", *["compared"] * bool(self._tally["compared"]), "captured", "eager")
        counts = ", ".join(f"{self._tally[name]} {name}" for name in names)
        why = next((reason for reason in (self._why, *(inner._why for inner in self._bound.values())) if reason), "")
        whole = f"{self.name}: {counts}" + (f"; {why}" if why else "")
        return "\n".join([whole, *[part.report() for part in self._all_parts()]])

    def _first(self, *arguments: Any, **options: Any) -> Any:
        """Whether there is a GPU is asked when there is something to do."""
        self._arguments = BoundArguments(arguments, options)
        if not torch.cuda.is_available():
            self._call = self._eager
        elif self._arguments:
            self._call = self._with_bound
        else:
            self._begin()
        return self._call(*arguments, **options)

    def _begin(self) -> None:
        self._eager_stream = EagerStream(self._step)
        self._rehearsal = Rehearsal(self._eager_stream)
        self._call = self._rehearse

    def _with_bound(self, *arguments: Any, **options: Any) -> Any:
        """With other objects it is another step."""
        bound, inputs, rest = self._arguments.split(arguments, options)
        known, graphed = self._recent_bound
        if graphed is not None and len(bound) == len(known) and all(map(operator.is_, bound, known)):
            return graphed(*inputs, **rest)
        key = identity(bound)
        graphed = self._bound.get(key)
        if graphed is None:
            in_vain = sum(graphed.was_captured_in_vain() for graphed in self._bound.values())
            if len(self._bound) >= GRAPHS_PER_STEP or in_vain >= MOST_IN_VAIN:
                for graphed in self._bound.values():
                    graphed.release()
                self._bound.clear()
                if all(isinstance(leaf, Tensor) for leaf in tree_leaves(bound)):  # inputs with gradients of their own
                    self._begin()
                    return self._call(*arguments, **options)
                self._give_up("it is given other objects again and again; pass it tensors, and what stays the same")
                return self._eager(*arguments, **options)
            graphed = self._bound[key] = Graphed(self._arguments.bind(self._step, arguments, options))
            graphed._tally, graphed.divide = self._tally, self.divide
        self._recent_bound = bound, graphed
        return graphed(*inputs, **rest)

    def was_captured_in_vain(self) -> bool:
        """Whether there were no more calls than are compared to begin with, or time replays."""
        return self._call == self._replay and self._graphs.replays() < ReplayWorth.REPLAYS

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
            self._divide(rehearsal.finding, rehearsal.line)
        return returned

    def _replay(self, *arguments: Any, **options: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return self._eager(*arguments, **options)
        graphs = self._graphs
        try:
            returned = (graphs.run if graphs.is_decided else graphs.run_timed)((arguments, options))
        except Uncapturable as reason:
            self.release()
            self._divide(str(reason), reason.line)
            return self._call(*arguments, **options)
        if graphs.finding:
            self.release()
            self._give_up(graphs.finding)
        return returned

    def release(self) -> None:
        """Further calls are eager, and the optimizers as the user made them."""
        if self._call == self._replay:
            self._graphs.release()
        self._call = self._eager

    def _divide(self, reason: str, line: int) -> None:
        """It cannot be captured whole. `line`: where it does what a graph cannot. The next call shows which of its
        lines launch, and which have to stay besides."""
        code = code_of(self._step)
        if self.whole is not None and line:
            self._give_up(reason)
            self.whole._divide_anew(line)
        elif self.divide is None or code is None:
            self._give_up(reason)
            if self.instead is not None:
                self.instead()
        else:
            self._staying.add(line)
            self._call = functools.partial(self._eager_divided, code, reason)

    def _divide_anew(self, line: int) -> None:
        """One of its parts cannot be captured, for what it does at this line."""
        if self._parts is not None and line not in self._staying:
            for part in self._parts.graphed:
                part.release()
            self._divide(self._why.partition(": ")[2], line)

    def _eager_divided(self, code: CodeType, reason: str, /, *arguments: Any, **options: Any) -> Any:
        is_first, self._call = self._parts is None, self._eager
        with CalledModules() as called, LaunchedLines(code) as lines, without_argument_checks():
            returned = self._eager(*arguments, **options)
        lines.staying |= self._staying
        self._parts = self.divide(self._step, lines) if self.divide is not None else None
        if self._modules is None:
            self._modules = GraphedModules(called.step, self._graph_of_module)
        if self._parts is None and not self._modules:
            self._give_up(reason)
            return returned
        for part in self._parts.graphed if self._parts is not None else ():
            part.warns, part.whole = False, self
        self._call = functools.partial(self._with_modules, self._eager if self._parts is None else self._parts.run)
        if is_first:
            self._warn(f"module by module: {reason}" if self._parts is None else f"in parts: {reason}")
        return returned

    def _graph_of_module(self, forward: Callable[..., Any], name: str) -> Graphed[..., Any]:
        made = Graphed(forward)
        made.name, made.warns = f"{name} of {self.name}", False
        return made

    def _with_modules(self, run: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """What no part holds may still call modules that have graphs."""
        if not self._modules:
            return run(*arguments, **options)
        with self._modules.standing_in():
            return run(*arguments, **options)

    def _give_up(self, reason: str) -> None:
        self._warn(f"eagerly: {reason}")
        self._call = self._eager

    def _warn(self, what: str) -> None:
        self._why = f"keepbusy.graph runs {self.name} {what}"
        if self.warns:
            warnings.warn(self._why, stacklevel=depth_of_user())
