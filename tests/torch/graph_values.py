"""Programs whose values, random numbers and memory come of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graph_asking import Said, capture, ones, program
from torch import nn

# values


@program
def nothing_runs_at_capture() -> Said:
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        y = x * 2
    captured = x.tolist()
    graph.replay()
    graph.replay()
    return [captured, x.tolist(), y.tolist()]


@program
def new_input_new_output() -> Said:
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2).cumsum(0)
    place = y.data_ptr()
    found = []
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        found.append(y.tolist())
    return [found, place == y.data_ptr()]


@program
def the_pool_is_shared() -> Said:
    """Memory freed within one capture serves the next one of the same pool."""
    x, first, second = ones(1024), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        a = x * 2
        place = a.data_ptr()
        del a
        b = x * 3
    reused = b.data_ptr() == place
    with torch.cuda.graph(second, pool=first.pool()):
        c = b + 1
    first.replay()
    second.replay()
    return [reused, c[:2].tolist(), b.data_ptr() != c.data_ptr()]


@program
def memory_of_a_graph() -> Said:
    torch.cuda.empty_cache()
    x = ones(8 << 20)  # 32 MB
    at_first, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    allocated = torch.cuda.memory_allocated()

    def now() -> list[int]:
        return [torch.cuda.memory_allocated() - allocated, torch.cuda.memory_reserved() - at_first]

    steps = []
    with torch.cuda.graph(graph):
        y = x * 2
        z = y * 2
        del y
        w = z * 2
    steps.append(now())
    del z
    steps.append(now())
    torch.cuda.empty_cache()
    steps.append(now())
    del w
    torch.cuda.empty_cache()
    steps.append(now())
    graph.reset()
    steps.append(now())
    torch.cuda.empty_cache()
    steps.append(now())
    return steps


# random numbers


@program
def draws_as_eager_code() -> Said:
    x, graph = ones(256), torch.cuda.CUDAGraph()
    torch.nn.functional.dropout(x)  # warm
    torch.cuda.manual_seed(5)
    eager = [torch.nn.functional.dropout(x).tolist() for _ in range(3)]
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    with torch.cuda.graph(graph):
        y = torch.nn.functional.dropout(x)
    untouched = torch.equal(state, torch.cuda.get_rng_state())
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append(y.tolist())
    replayed.append(torch.nn.functional.dropout(x).tolist())
    torch.cuda.manual_seed(5)
    graph.replay()
    return [untouched, replayed == eager, y.tolist() == eager[0], eager[0] != eager[1]]


@program
def generator_registered() -> Said:
    generator, graph = torch.Generator("cuda").manual_seed(1), torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        x = torch.rand(4, device="cuda", generator=generator)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(x.tolist())
    generator.manual_seed(1)
    eager = [torch.rand(4, device="cuda", generator=generator).tolist() for _ in range(2)]
    return [found == eager]


@program
def checkpoint_within() -> Said:
    from torch.utils.checkpoint import checkpoint

    layer, x = nn.Linear(4, 4).cuda(), ones(2, 4).requires_grad_()
    return capture(lambda: checkpoint(lambda y: layer(y).relu(), x, use_reentrant=False).sum().backward())


# training


def warmed(step: Callable[[], Any], count: int = 3) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(count):
            step()
    torch.cuda.current_stream().wait_stream(side)


@program
def optimizer_not_capturable() -> Said:
    layer = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(layer.parameters())

    def step() -> None:
        optimizer.zero_grad()
        layer(ones(2, 4)).sum().backward()
        optimizer.step()

    warmed(step)
    return capture(step)


@program
def scaler_step_within() -> Said:
    layer, scaler = nn.Linear(4, 4).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(layer(ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    warmed(step)
    return capture(step)
