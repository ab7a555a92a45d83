"""Programs that copy, fork and wait within a capture."""

from __future__ import annotations

import torch
from graph_asking import Said, capture, ones, program, recorded, said, two


@program
def mask_put() -> Said:
    x, at = ones(), ones() > 0

    def body() -> None:
        x[at] = 3.0

    return [*capture(body), x.tolist()]


@program
def copy_to_pinned() -> Said:
    x, home = ones(), torch.zeros(4).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        home.copy_(x, non_blocking=True)
    before = home.tolist()
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    return [before, home.tolist()]


@program
def copy_from_pinned() -> Said:
    x, source = ones(), torch.full((4,), 2.0).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(source, non_blocking=True)
    before = x.tolist()
    source.fill_(5)
    graph.replay()
    return [before, x.tolist()]


@program
def number_of_the_host() -> Said:
    """A host tensor of no dimensions joins by its value: is it read at capture or at replay?"""
    x, number = ones(), torch.tensor(2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * number
        x.fill_(number)
    number.fill_(7.0)
    graph.replay()
    return [y.tolist(), x.tolist()]


@program
def captured_event_afterwards() -> Said:
    event, x = torch.cuda.Event(enable_timing=True), ones()
    earlier, graph = recorded(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        event.record()
    return [
        said(event.query),
        said(event.synchronize),
        said(lambda: earlier.elapsed_time(event)),
        said(lambda: torch.cuda.current_stream().wait_event(event)),
        said(two),
    ]


@program
def empty_cache_with_cache() -> Said:
    side, stream = torch.empty(64 << 20, device="cuda"), torch.cuda.Stream()

    def body() -> None:
        nonlocal side
        del side
        torch.cuda.empty_cache()

    return capture(body, stream=stream)


@program
def new_memory() -> Said:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.full((16 << 20,), 3.0, device="cuda")
    graph.replay()
    return [x[:2].tolist()]


# modes and other threads


@program
def mode_unknown() -> Said:
    return capture(lambda: None, capture_error_mode="strict")


# streams


@program
def fork_and_join() -> Said:
    x, side, graph = ones(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y + 1
            inside = torch.cuda.is_current_stream_capturing()
        torch.cuda.current_stream().wait_stream(side)
        w = z * 10
    x.fill_(3)
    graph.replay()
    return [inside, side.is_capturing() if hasattr(side, "is_capturing") else False, w.tolist()]


@program
def fork_without_join() -> Said:
    x, side = ones(), torch.cuda.Stream()

    def body() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    return capture(body)


@program
def fork_without_work_or_join() -> Said:
    x, side = ones(), torch.cuda.Stream()

    def body() -> None:
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())

    return capture(body)


@program
def wait_for_uncaptured_work() -> Said:
    x, side = ones(), torch.cuda.Stream()

    def body() -> None:
        torch.cuda.current_stream().wait_stream(side)
        x.add_(1)

    with torch.cuda.stream(side):
        x.add_(1)
    return capture(body)


@program
def capture_on_the_default_stream() -> Said:
    graph = torch.cuda.CUDAGraph()
    return [said(graph.capture_begin), torch.cuda.is_current_stream_capturing()]
