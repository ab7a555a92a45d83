"""What a program may ask for within a capture: one line each, and what a GPU says to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Said = list[Any]
MODES = ("global", "thread_local", "relaxed")


PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(does: Callable[[], Any]) -> Callable[[], Any]:
    """One more that a GPU and the virtual one must say the same to."""
    PROGRAMS[does.__name__] = does
    return does


def heard(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def said(does: Callable[[], Any]) -> Any:
    """What comes of it, as JSON can hold it: a value, or the first line of an error."""
    try:
        found = does()
    except Exception as error:
        return heard(error)
    return found.tolist() if isinstance(found, torch.Tensor) else found


def two() -> float:
    """Whether the device still computes."""
    return (torch.ones(1, device="cuda") + 1).item()


def capture(body: Callable[[], Any], **options: Any) -> Said:
    """What the body says within a capture, what the capture says, and whether the device goes on."""
    graph, inside = torch.cuda.CUDAGraph(), []

    def whole() -> str:
        with torch.cuda.graph(graph, **options):
            try:
                found = body()
                inside.append("fine" if found is None or isinstance(found, torch.Tensor) else found)
            except Exception as error:
                inside.append(heard(error))
                raise
        return "captured"

    outcome = said(whole)
    return [*inside, outcome, said(two)]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (4,), device="cuda")


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    torch.cuda.synchronize()
    return event


def elsewhere(does: Callable[[], Any]) -> Any:
    """The same, asked by another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(said(does)))
    thread.start()
    thread.join()
    return found[0]


def on_stream(stream: Any, does: Callable[[], Any]) -> Any:
    with torch.cuda.stream(stream):
        return does()


class AtHand:
    """What there was before the capture began."""

    def __init__(self) -> None:
        self.x, self.big = ones(), ones(1 << 20)
        self.host, self.big_host = torch.full((4,), 2.0), torch.zeros(1 << 20)
        self.pinned = self.host.pin_memory()
        self.earlier, self.later, self.unrecorded = recorded(), recorded(), torch.cuda.Event()
        self.side, self.default = torch.cuda.Stream(), torch.cuda.default_stream()
        self.state = torch.cuda.get_rng_state()
        self.generator = torch.Generator("cuda").manual_seed(1)
        self.graph = torch.cuda.CUDAGraph()


ASKED: dict[str, Callable[[AtHand], Any]] = {
    # reading
    "item": lambda at: at.x.sum().item(),
    "truth": lambda at: bool(at.x.sum() > 3),
    "print": lambda at: repr(at.x),
    "nonzero": lambda at: at.x.nonzero(),
    "mask": lambda at: at.x[at.x > 0],
    "home": lambda at: at.x.cpu(),
    "home, not blocking": lambda at: at.x.to("cpu", non_blocking=True).is_pinned(),
    "to pinned": lambda at: at.pinned.copy_(at.x),
    "to pageable, not blocking": lambda at: at.host.copy_(at.x, non_blocking=True),
    # bringing
    "from pinned": lambda at: at.x.copy_(at.pinned),
    "from pageable": lambda at: at.x.copy_(at.host),
    "from pageable, not blocking": lambda at: at.x.copy_(at.host, non_blocking=True),
    "much from pageable, not blocking": lambda at: at.big.copy_(at.big_host, non_blocking=True),
    "made of a list": lambda at: torch.tensor([1.0, 2.0], device="cuda"),
    "made of a number": lambda at: torch.tensor(1.0, device="cuda"),
    "index of the host": lambda at: at.x[torch.tensor([1, 2])],
    "index by a list": lambda at: at.x[[1, 2]],
    "pinning": lambda at: torch.ones(4).pin_memory().is_pinned(),
    # waiting
    "device sync": lambda at: torch.cuda.synchronize(),
    "own stream's sync": lambda at: torch.cuda.current_stream().synchronize(),
    "own stream's query": lambda at: torch.cuda.current_stream().query(),
    "own event's query": lambda at: torch.cuda.current_stream().record_event().query(),
    "own event's sync": lambda at: torch.cuda.current_stream().record_event().synchronize(),
    "earlier events' time": lambda at: at.earlier.elapsed_time(at.later) >= 0,
    "wait for an earlier event": lambda at: torch.cuda.current_stream().wait_event(at.earlier),
    "wait for an unrecorded event": lambda at: torch.cuda.current_stream().wait_event(at.unrecorded),
    "wait for another stream": lambda at: torch.cuda.current_stream().wait_stream(at.side),
    # memory
    "empty cache": lambda at: torch.cuda.empty_cache(),
    "memory's figures": lambda at: torch.cuda.memory_allocated() >= 0 and torch.cuda.mem_get_info()[0] > 0,
    # random numbers
    "seed": lambda at: torch.cuda.manual_seed(3),
    "random state": lambda at: len(torch.cuda.get_rng_state()) > 0,
    "random state put back": lambda at: torch.cuda.set_rng_state(at.state),
    "initial seed": lambda at: torch.cuda.initial_seed() >= 0,
    "draw": lambda at: torch.rand(4, device="cuda"),
    "draw, of a generator unregistered": lambda at: torch.rand(4, device="cuda", generator=at.generator),
    # captures
    "launch on the default stream": lambda at: on_stream(at.default, lambda: at.x.add_(1)),
    "launch on another stream": lambda at: on_stream(at.side, lambda: at.x.add_(1)),
    "capture": lambda at: at.graph.capture_begin(),
    "whether it captures": lambda at: torch.cuda.is_current_stream_capturing(),
    "nothing": lambda at: None,
}
IN_EVERY_MODE: dict[str, Callable[[AtHand], Any]] = {
    "event's query": lambda at: at.earlier.query(),
    "event's query elsewhere": lambda at: elsewhere(lambda: at.earlier.query() in (True, False)),
    "event's sync": lambda at: at.earlier.synchronize(),
    "other stream's sync": lambda at: at.side.synchronize(),
    "other stream's query": lambda at: at.side.query(),
    "device sync": lambda at: torch.cuda.synchronize(),
    "device sync elsewhere": lambda at: elsewhere(torch.cuda.synchronize),
    "item elsewhere": lambda at: elsewhere(lambda: at.x.sum().item()),
    "item on another stream": lambda at: on_stream(at.side, lambda: at.x.sum().item()),
    "item on the default stream": lambda at: on_stream(at.default, lambda: at.x.sum().item()),
    "pageable copy on another stream": lambda at: on_stream(at.side, lambda: at.x.copy_(at.host)),
}


def ask(name: str) -> Said:
    """What is said, and what the tensor at hand holds afterwards."""
    at = AtHand()
    return [*capture(lambda: ASKED[name](at)), at.x.tolist()]


def ask_in_every_mode(name: str) -> dict[str, Said]:
    return {mode: capture(partial(IN_EVERY_MODE[name], AtHand()), capture_error_mode=mode) for mode in MODES}
