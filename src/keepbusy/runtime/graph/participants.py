"""Who takes part in a step: the modules it calls, what it steps, and the tensors that gather gradients.

The step is a function, and nothing says what it trains. So PyTorch is watched while the first calls run: it has hooks
for modules and optimizers; backward passes, schedulers and scalers tell of their calls. The heap is never searched: a
production process may have frozen it, and walking a large one takes most of a second.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from threading import Lock
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from keepbusy.runtime.graph.names_read import is_a
from keepbusy.runtime.graph.reachable import has_memory
from keepbusy.runtime.graph.user_lines import line_within
from keepbusy.runtime.module_parts import own_weights
from keepbusy.torch_names.pytorch import LAST_RATES

_FREED = "keepbusy: a backward pass has gone through for the last time"
"""Noted at nodes of graphs of gradients."""


class Participants:
    """All that took part in the calls that were watched so far, in the order in which they did."""

    def __init__(self, code: CodeType | None = None) -> None:
        """`code`: of the step."""
        self._code = code
        self.modules: dict[torch.nn.Module, None] = {}
        self.optimizers: dict[Optimizer, int] = {}
        """Each with the line of the step at which it steps; 0 where that is not known."""
        self.schedulers: dict[LRScheduler, None] = {}
        self.schedules_step_last = True
        """Whether no optimizer steps behind them in the same call."""
        self.scalers: dict[torch.amp.GradScaler, None] = {}
        self._leaves: dict[int, Tensor] = {}

    @contextmanager
    def watching(self, is_captured: bool = False) -> Iterator[Gradients]:
        """Meanwhile whoever takes part is noted. The gradients are those that there are as it begins. `is_captured`:
        all tensors that gather gradients are known by now but those that the step makes itself."""
        gradients = Gradients(self.gathering())

        scheduled: list[LRScheduler] = []

        def on_step(optimizer: Optimizer, *_arguments: Any) -> None:
            self.schedules_step_last &= not scheduled
            self.optimizers[optimizer] = line_within(sys._getframe(), self._code)
            gradients.note_step(optimizer)

        called = dict[int, weakref.ref[torch.nn.Module]]()

        def on_call(module: torch.nn.Module, _arguments: Any) -> None:
            if module not in self.modules:
                called[id(module)] = weakref.ref(module)

        hooks = [
            register_module_forward_pre_hook(on_call),
            register_optimizer_step_pre_hook(on_step),
        ]

        def on_schedule(scheduler: LRScheduler) -> None:
            scheduled.append(scheduler)
            self.schedulers.setdefault(scheduler)

        watcher = _Watcher(gradients.note_backward, on_schedule, self._note_scaler, gradients.note_clearing)
        _watch(watcher)
        try:
            yield gradients
        finally:
            _unwatch(watcher)
            for hook in hooks:
                hook.remove()
            alive = [module for ref in called.values() if (module := ref()) is not None]
            self.modules |= dict.fromkeys(alive)  # others, as a loss's, are made and gone within each call
            if not is_captured:
                self._leaves |= {id(leaf): leaf for leaf in gradients.keep_those_alive()}

    def add_weights(self, values: Iterable[Any]) -> None:
        """Those among these values, which the step finds by names."""
        self._leaves |= {
            id(value): value for value in values if is_a(value, Tensor) and is_weight(value) and has_memory(value)
        }

    def _note_scaler(self, scaler: torch.amp.GradScaler, optimizer: Optimizer | None) -> None:
        if scaler.is_enabled():  # else it has no state
            self.scalers.setdefault(scaler)
            if optimizer is not None:  # which has not stepped yet where gradients overflow at first
                self.optimizers.setdefault(optimizer, 0)

    def forget(self, past: Set[int]) -> None:
        """Tensors that are in use no more, by their identity."""
        self._leaves = {key: leaf for key, leaf in self._leaves.items() if key not in past}

    def have_state(self) -> bool:
        """Whether all optimizers have made their state: in a graph it would be made anew by each replay."""
        return all(optimizer.state or "capturable" not in optimizer.defaults for optimizer in self.optimizers)

    def sparse_weights(self) -> set[int]:
        """Those whose gradients are, by their identity: of embeddings that say so, and where there are gradients."""
        tables = [module for module in self.modules if getattr(module, "sparse", False)]
        of_tables = {id(weight) for module in tables for weight in own_weights(module)}
        return of_tables | {
            id(tensor) for tensor in self.gathering() if tensor.grad is not None and tensor.grad.is_sparse
        }

    def gathering(self) -> list[Tensor]:
        """Every tensor known that may gather a gradient."""
        weights = [weight for module in self.modules for weight in own_weights(module)]
        stepped = [
            weight for optimizer in self.optimizers for group in optimizer.param_groups for weight in group["params"]
        ]
        known = {id(weight): weight for weight in (*weights, *stepped, *self._leaves.values())}
        return [tensor for tensor in known.values() if tensor.requires_grad and tensor.is_leaf]


class HeldGradient(NamedTuple):
    """One tensor's gradient before the step and after it."""

    leaf: Tensor
    entry: Tensor | None
    exit: Tensor | None
    needed: bool  # the step reads or extends what it finds, and looks for it in the memory of `entry`


class Gradients:
    """The gradients that there are as a step begins: to be brought back, or compared with those that it leaves.

    Those of tensors that nobody knew are noted when a backward pass is about to reach them. A tensor that the step made
    itself is gone when the step is over, and only a weak reference knew it.
    """

    def __init__(self, leaves: list[Tensor]) -> None:
        self._entries = [(leaf, leaf.grad, _version(leaf.grad)) for leaf in leaves]
        self._known = {id(leaf) for leaf in leaves}
        self._found: list[tuple[weakref.ref[Tensor], Tensor | None, int]] = []
        self._applied: set[int] = set()
        self._stepped: set[int] = set()

    def note_step(self, optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._note(weights)
        self._stepped |= {id(weight) for weight in weights}
        self._applied |= {id(weight.grad) for weight in weights}

    def note_clearing(self, holder: Optimizer | torch.nn.Module) -> None:
        """Gradients are cleared, perhaps of weights that nothing else in the step tells of."""
        groups = holder.param_groups if isinstance(holder, Optimizer) else [{"params": [*holder.parameters()]}]
        self._note([weight for group in groups for weight in group["params"]])

    def may_go_back(self, returned: Iterable[Any]) -> bool:
        """Whether a backward pass from one of these values may follow: none has freed a part of its graph yet."""
        for result in returned:
            nodes = (
                _nodes_behind([result.grad_fn]) if isinstance(result, Tensor) and result.grad_fn is not None else None
            )
            if nodes is not None and not any(_FREED in node.metadata for node in nodes):
                return True
        return False

    def note_backward(self, outputs: Any, keeps_graph: bool) -> None:
        """The leaves that it will reach."""
        nodes: list[Any] = []
        for output in [outputs] if isinstance(outputs, Tensor | GradientEdge) else [*outputs]:
            if isinstance(output, Tensor) and output.is_leaf:
                self._note([output])
            else:  # a tensor, or an edge of the graph of gradients
                nodes.append(output.grad_fn if isinstance(output, Tensor) else output.node)
        for node in _nodes_behind(nodes):
            if type(node).__name__ == "AccumulateGrad":
                self._note([node.variable])
            elif not keeps_graph:
                node.metadata[_FREED] = True  # a list of them here would keep the tensors of the step alive

    def keep_those_alive(self) -> list[Tensor]:
        """At the end of the step: what was found, and lives on."""
        found = [(leaf, entry, version) for ref, entry, version in self._found if (leaf := ref()) is not None]
        self._entries += found
        self._found = []
        return [leaf for leaf, _, _ in found]

    def restore(self) -> None:
        for leaf, entry, _ in self._entries:
            leaf.grad = entry

    def held(self) -> list[HeldGradient]:
        """Of the tensors whose gradients the step changed, and of those that it trained."""
        held = []
        for leaf, entry, version in self._entries:
            written = _version(entry) != version
            if leaf.grad is not entry or written or id(leaf) in self._stepped:
                reads = leaf.grad is entry or written or id(entry) in self._applied
                held.append(HeldGradient(leaf, entry, leaf.grad, entry is not None and reads))
        return held

    def _note(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._known and leaf.requires_grad and leaf.is_leaf and has_memory(leaf):
                self._known.add(id(leaf))
                self._found.append((weakref.ref(leaf), leaf.grad, _version(leaf.grad)))


def is_weight(result: Any) -> bool:
    """Whether it gathers gradients itself."""
    return isinstance(result, Tensor) and result.is_leaf and result.requires_grad


def weights_behind(results: Iterable[Any]) -> list[Tensor]:
    """The tensors that would gather gradients in a backward pass from these."""
    ends = [result.grad_fn for result in results if isinstance(result, Tensor) and result.grad_fn is not None]
    return [node.variable for node in _nodes_behind(ends) if type(node).__name__ == "AccumulateGrad"]


def _nodes_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes of a graph of gradients, and all that they lead to."""
    ahead = [*nodes]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        following = {following_node for following_node, _ in node.next_functions if following_node is not None} - seen
        seen |= following
        ahead += following


def enter(held: list[HeldGradient]) -> None:
    """Before a replay: gradients that it needs, which these are, stand where it looks for them, whatever `.grad` points
    to by now."""
    for leaf, entry, _, _ in held:
        found = leaf.grad
        if entry is not None and found is not None and found is not entry:
            entry.copy_(found)


def leave(held: list[HeldGradient]) -> None:
    """After a replay: everybody finds the gradients where it has put them."""
    for leaf, _, exit_, _ in held:
        if leaf.grad is not exit_:
            leaf.grad = exit_


class HeldSchedules:
    """Steps of learning rate schedules that a step makes, held back until it is over: they change the host alone, so
    they follow a replay as they follow an eager call."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []

    @contextmanager
    def holding(self) -> Iterator[None]:
        """They are made as this ends, also where the step fails."""
        restores = [self._hold(kind) for kind in _kinds(LRScheduler) if "step" in vars(kind)]
        try:
            yield
        finally:
            for restore in restores:
                restore()
            for step in self.steps:
                step()

    def _hold(self, kind: Any) -> Callable[[], None]:
        function = vars(kind)["step"]

        @functools.wraps(function)
        def held(*arguments: Any, **options: Any) -> None:
            self.steps.append(functools.partial(function, *arguments, **options))

        kind.step = held
        return functools.partial(setattr, kind, "step", function)


def may_be_held(schedulers: Iterable[LRScheduler], words: Set[str]) -> bool:
    """Whether nothing in the step, which uses these words, looks at what they change."""
    follow_values = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers)
    return not follow_values and not words & {"get_last_lr", LAST_RATES, "last_epoch", "param_groups"}


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


# PyTorch has no hooks for these calls. Their functions are replaced while anybody watches, in whatever thread.


class _Watcher(NamedTuple):
    backward: Callable[[Any, bool], Any]
    scheduler: Callable[[Any], Any]
    scaler: Callable[[Any, Any], Any]
    clearing: Callable[[Any], Any]


_LOCK = Lock()
_WATCHERS: list[_Watcher] = []
_RESTORES: list[Callable[[], None]] = []


def _watch(watcher: _Watcher) -> None:
    with _LOCK:
        _WATCHERS.append(watcher)
        if len(_WATCHERS) > 1:
            return
        kinds = [(kind, name) for kind in _kinds(torch.amp.GradScaler) for name in ("unscale_", "step", "update")]
        calls: list[tuple[Any, str, Callable[..., None]]] = [(*kind, _tell_scaler) for kind in kinds]
        calls += [(kind, "step", _tell_scheduler) for kind in _kinds(LRScheduler)]
        calls += [(torch.autograd, name, _tell_backward) for name in ("backward", "grad")]
        calls += [(kind, "zero_grad", _tell_clearing) for kind in (torch.nn.Module, *_kinds(Optimizer))]
        _RESTORES.extend(_showing(*call) for call in calls if call[1] in vars(call[0]))


def _unwatch(watcher: _Watcher) -> None:
    with _LOCK:
        _WATCHERS[:] = [kept for kept in _WATCHERS if kept is not watcher]
        while _RESTORES and not _WATCHERS:
            _RESTORES.pop()()


def _tell_backward(tensors: Any, /, **options: Any) -> None:
    keeps = options.get("retain_graph")
    for watcher in [*_WATCHERS]:
        watcher.backward(tensors, bool(options.get("create_graph") if keeps is None else keeps))


def _tell_clearing(holder: Any, /, **_options: Any) -> None:
    for watcher in [*_WATCHERS]:
        watcher.clearing(holder)


def _tell_scheduler(scheduler: LRScheduler, /, **_options: Any) -> None:
    for watcher in [*_WATCHERS]:
        watcher.scheduler(scheduler)


def _tell_scaler(scaler: torch.amp.GradScaler, /, optimizer: Optimizer | None = None, **_options: Any) -> None:
    for watcher in [*_WATCHERS]:
        watcher.scaler(scaler, optimizer)


def _showing(owner: Any, name: str, show: Callable[..., None]) -> Callable[[], None]:
    """Each call shows its arguments to the watchers."""
    function = vars(owner)[name]
    signature = inspect.signature(function)

    @functools.wraps(function)
    def telling(*arguments: Any, **options: Any) -> Any:
        try:
            (_, first), *others = signature.bind(*arguments, **options).arguments.items()
        except TypeError:  # the call itself says what is wrong with it
            return function(*arguments, **options)
        show(first, **dict(others))
        return function(*arguments, **options)

    def restore() -> None:
        if vars(owner)[name] is telling:
            setattr(owner, name, function)

    setattr(owner, name, telling)
    return restore


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    derived: type
    for derived in kind.__subclasses__():
        yield from _kinds(derived)
