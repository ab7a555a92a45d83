"""Forward and backward pass of a turn as one launch: captured as a CUDA graph by `keepbusy.graph`, and replayed.

Before anything is captured the passes run as they are written, and twice they are watched: all that they read on the
host is known then, or they stay as they are. From then on it is compared before each replay; where it differs, the turn
runs as it is written, and what it reads is found out anew. The first replays are made both ways from one state: what
comes out, gradients, buffers and random numbers must be the same to the last bit.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from keepbusy.fix.live.switch import CHECKED, FixSwitch, is_ours, ours, same_bits
from keepbusy.instrument.patches import Patches
from keepbusy.runtime.graph.capture import Uncapturable
from keepbusy.runtime.graph.captured_call import EagerStream, StepCall
from keepbusy.runtime.graph.graphed_step import Rehearsal, StepGraphs
from keepbusy.runtime.graph.host_reads import HostReads

_FRESH_STARTS = 4
"""So often what is read on the host may have become something else."""
_ROOM = 2.5
"""Memory for the graph's own tensors beside those of turns as they are written: of what the program took at most."""


class GraphedTurns:
    """Of each place that goes forward and backward its graphs."""

    def __init__(self, begin_again: Callable[[], None]) -> None:
        """`begin_again`: turns that were measured so far say nothing of those to come."""
        self.switch = FixSwitch("graph", "forward and backward passes that were one launch")
        self._begin_again = begin_again
        self._turns: dict[CodeType, GraphedTurn] = {}

    def patch(self, patches: Patches) -> None:
        """Nothing of PyTorch's is replaced; the source calls `passes`."""
        patches.later(self._turns.clear)

    def passes(self, function: FunctionType, *given: Any) -> Any:
        """What the source calls in place of the statements."""
        if not self.switch.on or is_ours() or function.__closure__ or torch.cuda.is_current_stream_capturing():
            return function(*given)
        if threading.active_count() > 1 and _others_run():
            return function(*given)
        turn = self._turns.get(function.__code__)
        if turn is None:
            turn = self._turns[function.__code__] = GraphedTurn(function, self.switch, self._begin_again)
        return turn.run(given)


class GraphedTurn:
    """Passes of one place: as they are written, watched, rehearsed, captured, compared, and then replayed."""

    def __init__(self, function: FunctionType, switch: FixSwitch, begin_again: Callable[[], None]) -> None:
        self._function, self._switch, self._begin_again = function, switch, begin_again
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self._reads, self._looks = HostReads(), 0
        self._tally = Counter[str]()
        self._checked = 0
        self._graphs: StepGraphs | None = None
        self.run: Callable[[tuple[Any, ...]], Any] = self._first

    def _give_up(self, why: str) -> None:
        self.run = self._plain
        self._graphs = None
        file, line = self._function.__code__.co_filename, self._function.__code__.co_firstlineno
        self._switch.notes.append(f"{file.rpartition('/')[2]}:{line} stays as it is written: {why}")

    def _plain(self, given: tuple[Any, ...]) -> Any:
        return self._function(*given)

    def _first(self, given: tuple[Any, ...]) -> Any:
        """Libraries load, and what comes only once is made."""
        self.run = self._look
        return self._function(*given)

    def _look(self, given: tuple[Any, ...]) -> Any:
        written = [one._version for one in _tensors(given)]
        try:
            with self._reads.watching():
                made = self._function(*given)
        except BaseException:  # half a call says nothing of a whole one
            self._reads, self._looks = HostReads(), 0
            raise
        self._looks += 1
        if not self._reads.is_on_device() and not any(one.is_cuda for one in _tensors((given, made))):
            self._reads.finding = self._reads.finding or "it computes nothing on the GPU"
        if written != [one._version for one in _tensors(given)]:
            self._reads.finding = self._reads.finding or "it writes to what it is given"
        if self._reads.finding:
            self._give_up(self._reads.finding)
        elif self._looks == 2:
            self._known = self._reads.now()
            with ours():
                self._eager = EagerStream(self._function)
            self._rehearsal = Rehearsal(self._eager)
            self.run = self._rehearse
        return made

    def _rehearse(self, given: tuple[Any, ...]) -> Any:
        rehearsal = self._rehearsal
        with ours():
            made = rehearsal.run(StepCall(given, {}))
        if rehearsal.finding:
            self._give_up(rehearsal.finding)
        elif self._reads.now() != self._known:
            self._begin_anew()
        elif rehearsal.over and not _has_room():
            self._give_up("a graph needs memory of its own, and there is too little")
        elif rehearsal.over:
            self._graphs = StepGraphs(self._eager, rehearsal, self._tally, self._switch.notes.append)
            self._state = DeviceState(self._reads, rehearsal.key.leaves)
            self.run = self._replay
        return made

    def _begin_anew(self) -> None:
        if self._starts < _FRESH_STARTS:
            self._start()
        else:
            self._give_up("what it reads on the host changes from turn to turn")

    def _replay(self, given: tuple[Any, ...]) -> Any:
        if self._reads.now() != self._known:
            self._begin_anew()
            return self.run(given)
        assert self._graphs is not None
        try:
            with ours():
                if self._checked < CHECKED:
                    return self._both_ways(given, self._graphs)
                replayed = self._tally["replayed"]
                made = self._graphs.run((given, {}))
        except Uncapturable as reason:
            self._give_up(str(reason))
            return self._function(*given)
        if self._tally["replayed"] != replayed:
            self._switch.count(sys._getframe(2))
        return made

    def _both_ways(self, given: tuple[Any, ...], graphs: StepGraphs) -> Any:
        """Replayed, and once more as it is written from the state before: that is what counts."""
        captured = self._tally["captured"] + self._tally["replayed"]
        state = self._state
        state.save()
        made = graphs.run((given, {}))
        if captured == self._tally["captured"] + self._tally["replayed"]:
            return made
        replayed = (made, state.results())
        state.restore()
        plain = self._eager.run(StepCall(given, {}))
        self._checked += 1
        self._switch.checked += 1
        if not same_bits([*map(_bare, tree_leaves(replayed))], [*map(_bare, tree_leaves((plain, state.results())))]):
            self._give_up("replayed, it came out different")
            return plain
        if self._checked == CHECKED:
            self._begin_again()
        return plain


class DeviceState:
    """What passes change on the device: random numbers, buffers, gradients."""

    def __init__(self, reads: HostReads, leaves: list[Tensor]) -> None:
        self._buffers = [one for module in reads.modules() for one in module._buffers.values() if one is not None]
        self._leaves = leaves

    def save(self) -> None:
        self._random = torch.cuda.get_rng_state()
        self._before = [one.clone() for one in self._buffers]
        self._gradients = [(one.grad, None if one.grad is None else one.grad.clone()) for one in self._leaves]

    def results(self) -> list[Any]:
        gradients = [None if one.grad is None else one.grad.clone() for one in self._leaves]
        return [gradients, [one.clone() for one in self._buffers], torch.cuda.get_rng_state()]

    def restore(self) -> None:
        torch.cuda.set_rng_state(self._random)
        with torch.no_grad():
            for one, before in zip(self._buffers, self._before, strict=True):
                one.copy_(before)
            for leaf, (gradient, value) in zip(self._leaves, self._gradients, strict=True):
                leaf.grad = gradient
                if gradient is not None and value is not None:
                    gradient.copy_(value)


def _others_run() -> bool:
    """Whether the program has other threads. What they ask of PyTorch in the middle of a capture would fail."""
    others = (one for one in threading.enumerate() if one is not threading.current_thread())
    return any(not _serves_batches(one) for one in others)


def _serves_batches(thread: threading.Thread) -> bool:
    """A thread of a loader's, of its queues' or of a progress bar's, none of which waits for the device."""
    begun_by = getattr(getattr(thread, "_target", None), "__module__", type(thread).__module__)
    return str(begun_by).startswith(("torch.utils.data", "multiprocessing", "tqdm"))


def _tensors(held: Any) -> list[Tensor]:
    return [one for one in tree_leaves(held) if isinstance(one, Tensor)]


def _bare(one: Any) -> Any:
    return one.detach() if isinstance(one, Tensor) else one


def _has_room() -> bool:
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return free + reserved > (_ROOM - 1) * torch.cuda.max_memory_allocated()
