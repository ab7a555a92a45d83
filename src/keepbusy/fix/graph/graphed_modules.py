"""Modules of a program whose forward and backward pass become one launch each, with the program as it is.

The modules are those that the program, a trainer or a library calls, not those within. Each is watched while it runs as
it is written, twice: all that it reads on the host is known then, or it stays as it is. From then on that is compared
before each replay; where it differs, the call runs as it is written, and what it reads is found out anew. The first
replays are made both ways from one state: what comes out, gradients, buffers and random numbers must be the same to the
last bit.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from inspect import getattr_static
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from keepbusy.fix.graph.host_reads import HostReads
from keepbusy.fix.graph.passes import (
    Given,
    Passage,
    PassGraphs,
    ReplayedPassage,
    TrainedModule,
    WayBack,
    is_dense,
    newest_node,
)
from keepbusy.fix.live.switch import CHECKED, FixSwitch, is_ours, ours, same_bits
from keepbusy.instrument.patches import Function, Patches, left_alone
from keepbusy.runtime.graph.captured_call import StepCall, Uncapturable
from keepbusy.runtime.graph.names_read import PLAIN
from keepbusy.runtime.module_parts import own_weights, submodules

_CALLS_SEEN = 100
"""After so many calls nobody looks for further modules, or for one to be called as usual: each look costs a moment."""
_FRESH_STARTS = 4
"""So often what is read on the host may have become something else."""
_LOOKS_IN_VAIN = 4
"""So many calls may be looked at through which nobody goes back."""
_KINDS = 4
"""Of calls of one module. Each has graphs, and memory for all that a pass keeps."""
_KINDS_REMEMBERED = 64
_SMALLEST = 12
"""Nodes of autograd's. To hand tensors to a graph and back takes as long as launching about so many passes by hand."""
_AS_FAR = 8
"""Where sums come out differently each time, two of them may be this much further apart than two others."""
_ROOM = 2.5
"""Memory for the graphs' own tensors beside those of turns as they are written: of what the program took at most."""

Way: TypeAlias = Callable[[StepCall], Any]


class GraphedModules:
    """All modules that are called from outside."""

    def __init__(self, begin_again: Callable[[], None]) -> None:
        """`begin_again`: turns that were measured so far say nothing of those to come."""
        self.switch = FixSwitch("graph", "forward passes that were one launch, and so were their backward passes")
        self.begin_again = begin_again
        self.looked_at: list[GraphedCall] = []
        """Calls whose way back is still to come."""
        self._place = threading.local()
        self._met = weakref.WeakSet[nn.Module]()
        self._taken = weakref.WeakSet[nn.Module]()
        self._calls = 0
        self._search = Patches()

    def patch(self, patches: Patches) -> None:
        self._search.replace(nn.Module, "__call__", self._calling)
        patches.later(self._leave_all)
        patches.replace(torch.autograd, "backward", self._going_back)
        for owner, name in ((torch, "compile"), (nn.Module, "compile")):
            patches.replace(owner, name, self._compiling)

    def _calling(self, plain: Function) -> Function:
        place, meet = self._place, self._meet

        @left_alone
        def call(self: nn.Module, *given: Any, **named: Any) -> Any:  # the profiler looks for a module of this name
            if getattr(place, "is_inside", False) or is_ours() or not _is_trained(self):
                return plain(self, *given, **named)
            place.is_inside = True
            try:
                made = plain(self, *given, **named)
            finally:
                place.is_inside = False
            meet(self)
            return made

        return call

    def _meet(self, module: nn.Module) -> None:
        """A module has been called from outside. The second time it is not called by chance."""
        self._calls += 1
        if module in self._met:
            self._take(module, True)
        self._met.add(module)
        if self._calls == _CALLS_SEEN:
            self._search.undo()
            self._met.clear()

    def _take(self, module: nn.Module, is_outermost: bool) -> None:
        is_plain = isinstance(getattr_static(type(module), "forward"), FunctionType)  # TorchScript's is not
        if is_plain and module not in self._taken and "_compiled_call_impl" not in vars(module):
            module._compiled_call_impl = GraphedModule(module, self, is_outermost)
            self._taken.add(module)

    def _leave_all(self) -> None:
        """Modules as the program made them."""
        self._search.undo()
        for one in self._taken:
            if isinstance(vars(one).get("_compiled_call_impl"), GraphedModule):
                del one._compiled_call_impl

    def take_parts(self, module: nn.Module) -> None:
        """In place of a module that cannot be a launch the modules that it calls."""
        for part in filter(None, module._modules.values()):
            if getattr_static(type(part), "forward") is nn.Module.forward:  # a list of them
                self.take_parts(part)
            else:
                self._take(part, False)

    def _compiling(self, plain: Function) -> Function:
        """A compiler looks into modules, and is to find them as they are written."""

        def compiled(*given: Any, **named: Any) -> Any:
            self._leave_all()
            return plain(*given, **named)

        return compiled

    def _going_back(self, plain: Function) -> Function:
        def backward(tensors: Any, *given: Any, **named: Any) -> None:
            if self.looked_at and not is_ours():
                roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
                whole = WayBack([one for one in roots if isinstance(one, Tensor)])
                self.looked_at = [one for one in self.looked_at if not one.is_reached(whole)]
            plain(tensors, *given, **named)

        return backward


class GraphedModule:
    """What PyTorch calls in place of a module's `_call_impl`."""

    def __init__(self, module: nn.Module, all_modules: GraphedModules, is_outermost: bool) -> None:
        self._module, self.all, self._is_outermost = module, all_modules, is_outermost
        self._kinds: dict[Any, GraphedCall] = {}
        self._seen: set[Any] = set()
        self._calls_left = _CALLS_SEEN
        """Of those that are not as usual."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a module that is copied or saved with all its attributes: the other is called as it is written."""
        return type(None), ()

    def __call__(self, *given: Any, **named: Any) -> Any:
        called = sys._getframe(1).f_locals.get("self")  # by PyTorch's `_wrapped_call_impl`
        if called is not self._module and isinstance(called, nn.Module):  # which was given the attributes of this one
            return called._call_impl(*given, **named)
        plain = self._module._call_impl
        if not self.all.switch.on or is_ours() or not torch.is_grad_enabled():
            return plain(*given, **named)
        if not _is_usual():
            self._calls_left -= 1
            if not self._calls_left:
                vars(self._module).pop("_compiled_call_impl", None)
            return plain(*given, **named)
        call = StepCall(given, named)
        if not _is_takeable(call):
            return plain(*given, **named)
        kind = self._kind(call)
        found = self._kinds.get(kind)
        if found is None:
            if not self._comes_back(kind) or len(self._kinds) == _KINDS:
                return plain(*given, **named)
            found = self._kinds[kind] = GraphedCall(plain, self)
        return found.run(call)

    def _comes_back(self, kind: Any) -> bool:
        """Whether there was such a call before: what is of another shape each time is not looked at."""
        came_before = kind in self._seen
        if len(self._seen) == _KINDS_REMEMBERED:
            self._seen.clear()
        self._seen.add(kind)
        return came_before

    def give_up(self, why: str, has_parts: bool) -> None:
        """One kind of call stays as it is written. `has_parts`: its parts may be launches nonetheless."""
        if all(one.is_given_up for one in self._kinds.values()):
            vars(self._module).pop("_compiled_call_impl", None)
        if has_parts:
            self.all.take_parts(self._module)
        if self._is_outermost:
            parts = "; its parts were looked at in its place" if has_parts else ""
            self.all.switch.notes.append(f"{type(self._module).__name__} stays as it is written: {why}{parts}")

    def _kind(self, call: StepCall) -> Any:
        modes = (self._module.training, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        return (*call.kind, *modes, *[(one.requires_grad, one.device) for one in call.tensors])


def _is_trained(module: nn.Module) -> bool:
    weights = (weight for part in submodules([module]) for weight in own_weights(part))
    weight = next(weights, None) if torch.is_grad_enabled() else None
    return weight is not None and weight.is_cuda


def _is_usual() -> bool:
    """Whether nobody looks on, or computes something else with the same operators."""
    return (
        torch.cuda.is_initialized()  # not so where a loader's workers call a module
        and not torch.cuda.is_current_stream_capturing()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_anomaly_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and (threading.active_count() == 1 or not _others_run())
    )


def _is_takeable(call: StepCall) -> bool:
    here = torch.device("cuda", torch.cuda.current_device())
    return bool(call.tensors) and all(
        type(one) in PLAIN or (type(one) in (Tensor, nn.Parameter) and one.device == here and is_dense(one))
        for one in call.leaves
    )


class GraphedCall:
    """Calls of one kind: as they are written, watched, captured, compared, and then replayed."""

    def __init__(self, plain: Callable[..., Any], module: GraphedModule) -> None:
        self._plain, self._module, self._all, self._switch = plain, module, module.all, module.all.switch
        self._starts, self.is_given_up = 0, False
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self._reads, self._looks, self._in_vain = HostReads(), 0, 0
        self._checked = 0
        self._graphs: PassGraphs | None = None
        self._ahead: WayBack | None = None
        self._whole: WayBack | None = None
        self.run: Way = self._look

    def _give_up(self, why: str, has_parts: bool = True) -> None:
        self.run, self.is_given_up = self._as_written, True
        self._graphs = None
        self._module.give_up(why, has_parts)

    def _as_written(self, call: StepCall) -> Any:
        arguments, options = call.given
        return self._plain(*arguments, **options)

    def is_reached(self, whole: WayBack) -> bool:
        """Whether the program goes back through the call that was looked at."""
        assert self._ahead is not None
        if self._ahead.reached_by(whole):
            self._whole = whole
        return self._whole is whole

    def _look(self, call: StepCall) -> Any:
        if self._looks == 2:
            return self._looked(call)
        written = [one._version for one in call.tensors]
        since, random = newest_node(), torch.cuda.get_rng_state()
        try:
            with self._reads.watching():
                made = self._as_written(call)
        except BaseException:  # half a call says nothing of a whole one
            self._reads, self._looks = HostReads(), 0
            raise
        self._looks += 1
        if written != [one._version for one in call.tensors]:
            self._reads.finding = self._reads.finding or "it writes to what it is given"
        if self._reads.finding:
            self._give_up(self._reads.finding)
        elif self._looks == 2:
            self._note(call, made, since)
            self._is_random = not torch.equal(random, torch.cuda.get_rng_state())
        return made

    def _note(self, call: StepCall, made: Any, since: int) -> None:
        """What autograd made of the call."""
        self._known = self._reads.now()
        outputs = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        self._ahead = WayBack(outputs, [one for one in call.tensors if one.grad_fn is not None], since)
        self._whole = None
        self._all.looked_at.append(self)
        weights = (weight for part in self._reads.modules() for weight in own_weights(part))
        self._weights = {id(one): one for one in weights if one.requires_grad}
        known = self._weights.keys() | {id(one) for one in call.tensors}
        self._is_alone = self._ahead.is_closed and self._ahead.leaves.keys() <= known

    def _looked(self, call: StepCall) -> Any:
        """By now the program should have gone back through the call before."""
        ahead, whole = self._ahead, self._whole
        assert ahead is not None
        if whole is None:
            self._all.looked_at.remove(self)
            self._looks, self._in_vain = 1, self._in_vain + 1
            if self._in_vain == _LOOKS_IN_VAIN:
                self._give_up("nobody goes back through it by backward()")
            return self.run(call)
        if ahead.nodes < _SMALLEST:
            self._give_up("it is too small for a graph to save anything", has_parts=False)
            return self.run(call)
        if not _has_room():
            self._give_up("a graph needs memory of its own, and there is too little", has_parts=False)
            return self.run(call)
        if why := self._finding(ahead, whole):
            self._give_up(why)
            return self.run(call)
        self._reached = ahead.reached_by(whole)
        weights = [*self._weights.values()]
        self._trained = TrainedModule(
            self._plain, self._reads.modules(), weights, ahead.saved, self._is_random, ahead.name
        )
        self._ahead = self._whole = None
        self.run = self._pass
        return self.run(call)

    def _finding(self, ahead: WayBack, whole: WayBack) -> str:
        if not self._is_alone:
            return "it uses tensors that are trained and are neither its own nor given to it"
        if ahead.has_state:
            return "cuDNN's dropout keeps a state of its own"
        return ahead.finding(whole)

    def _begin_anew(self) -> None:
        if self._starts < _FRESH_STARTS:
            self._start()
        else:
            self._give_up("what it reads on the host changes from turn to turn")

    def _pass(self, call: StepCall) -> Any:
        """Once more as it is written: what it reads must be as before when it is over."""
        self.run = self._capture
        return self._as_written(call)

    def _capture(self, call: StepCall) -> Any:
        if self._reads.now() != self._known:
            self._begin_anew()
            return self.run(call)
        try:
            with ours():
                self._graphs = PassGraphs(self._trained, call, self._reached)
        except Uncapturable as reason:
            self._give_up(str(reason))
        else:
            self.run = self._replay
        return self.run(call)

    def _replay(self, call: StepCall) -> Any:
        graphs = self._graphs
        assert graphs is not None
        if self._reads.now() != self._known:
            self._begin_anew()
            return self.run(call)
        if graphs.is_open():
            return self._as_written(call)
        with ours():
            if self._checked < CHECKED:
                return ComparedPassage(self._trained, call, graphs, self._compared).run()
            self._switch.count(sys._getframe(2))
            return ReplayedPassage(self._trained, call, graphs).run()

    def _compared(self, is_equal: bool) -> None:
        """A pass was made both ways."""
        if not is_equal:
            self._give_up("replayed, it came out different")
            return
        self._checked += 1
        self._switch.checked += 1
        if self._checked == CHECKED:
            self._all.begin_again()


class ComparedPassage(Passage):
    """Both ways. What counts is what PyTorch makes of it as it is written."""

    def __init__(self, module: TrainedModule, call: StepCall, graphs: PassGraphs, tell: Callable[[bool], None]) -> None:
        super().__init__(module, call)
        self._replayed, self._tell = ReplayedPassage(module, call, graphs), tell

    def forward(self) -> list[Tensor]:
        before = self.module.state()
        replayed = [self._replayed.forward(), self.module.state().values]
        before.restore()
        made = super().forward()
        self._is_equal = same_bits(replayed, [made, self.module.state().values])
        return made

    def backward(self, given: Given) -> list[Tensor | None]:
        is_over, self.is_over = self.is_over, False
        made = super().backward(given)
        replayed = self._replayed.backward(given)
        with torch.no_grad():
            is_equal = same_bits(replayed, made) or _vary_alike(replayed, made, super().backward(given))
            self._tell(self._is_equal and is_equal)
        self.is_over = self._replayed.is_over = is_over
        return made


def _vary_alike(replayed: list[Tensor | None], made: list[Tensor | None], again: list[Tensor | None]) -> bool:
    """Whether what PyTorch makes differs from itself, for it adds up in no order, and the replay by no more."""
    for one, other, third in zip(replayed, made, again, strict=True):
        if one is None or other is None or third is None:
            if not one is other is third:
                return False
        elif not same_bits(one, other) and not (one - other).abs().max() <= _AS_FAR * (other - third).abs().max():
            return False
    return True


def _others_run() -> bool:
    """Whether the program has other threads. What they ask of PyTorch in the middle of a capture would fail."""
    others = (one for one in threading.enumerate() if one is not threading.current_thread())
    return any(not _serves_batches(one) for one in others)


def _serves_batches(thread: threading.Thread) -> bool:
    """A thread of a loader's, of its queues' or of a progress bar's, none of which waits for the device."""
    begun_by = getattr(getattr(thread, "_target", None), "__module__", type(thread).__module__)
    return str(begun_by).startswith(("torch.utils.data", "multiprocessing", "tqdm"))


def _has_room() -> bool:
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return free + reserved > (_ROOM - 1) * torch.cuda.max_memory_allocated()
