"""Programs that begin, end, reset and replay graphs in every order."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from graph_asking import Said, capture, ones, program, said


@program
def replay_without_capture() -> Said:
    graph = torch.cuda.CUDAGraph()
    return [said(graph.replay), said(graph.pool), said(graph.reset)]


@program
def capture_twice() -> Said:
    graph, x = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.graph(graph):
        x.add_(1)

    def again() -> None:
        with torch.cuda.graph(graph):
            x.add_(1)

    return [said(again), torch.cuda.is_current_stream_capturing()]


@program
def reset_and_capture_again() -> Said:
    graph, x = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    graph.reset()
    gone = said(graph.replay)
    with torch.cuda.graph(graph):
        x.mul_(10)
    graph.replay()
    return [gone, x.tolist()]


@program
def replay_within_capture() -> Said:
    inner, x = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.graph(inner):
        x.add_(1)
    return [*capture(inner.replay), x.tolist()]


@program
def end_without_begin() -> Said:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        return [said(graph.capture_end)]


@program
def end_on_another_stream() -> Said:
    graph, one, other = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        graph.capture_begin()
        with torch.cuda.stream(other):
            wrong = said(graph.capture_end)
        return [wrong, said(graph.capture_end)]


@program
def go_on_after_an_error() -> Said:
    x = ones()
    return capture(
        lambda: [said(lambda: x.sum().item()), said(lambda: x.add_(1)), said(torch.cuda.is_current_stream_capturing)]
    )


@program
def own_error_within() -> Said:
    x, graph = ones(), torch.cuda.CUDAGraph()

    def body() -> None:
        with torch.cuda.graph(graph):
            x.add_(1)
            raise ValueError("mine")

    return [said(body), said(graph.replay), x.tolist()]


@program
def instantiate_by_hand() -> Said:
    x, kept, usual = ones(), torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.CUDAGraph()
    early = said(kept.instantiate)
    for graph in (kept, usual):
        with torch.cuda.graph(graph):
            x.add_(1)
    return [early, said(kept.instantiate), said(usual.instantiate), said(kept.replay), x.tolist()]


@program
def raw_graphs() -> Said:
    graph, x = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.graph(graph):
        x.add_(1)
    return [said(graph.raw_cuda_graph)]


@program
def dump() -> Said:
    graph, x = torch.cuda.CUDAGraph(), ones()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        x.add_(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        path = Path(folder) / "graph.dot"
        warnings.simplefilter("ignore")
        graph.debug_dump(str(path))
        return [path.exists(), path.read_text().startswith("digraph") if path.exists() else None]


@program
def pool_handles() -> Said:
    handle = torch.cuda.graph_pool_handle()
    graph, x = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.graph(graph, pool=handle):
        x.add_(1)
    return [len(handle), handle[0] == 0, graph.pool() == handle, torch.cuda.graph_pool_handle() != handle]


@program
def external_event() -> Said:
    event, x, graph = torch.cuda.Event(external=True), ones(), torch.cuda.CUDAGraph()

    def body() -> None:
        with torch.cuda.graph(graph):
            x.add_(1)
            event.record()

    return [said(body)]
