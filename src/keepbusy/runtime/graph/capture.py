"""Capturing: what runs inside is kept as a CUDA graph, and nothing of it happens yet.

A step that does what a graph cannot is found here. PyTorch is told to refuse a sync before the driver sees it, so that
the capture ends in good order; where the driver refuses first, allocator and random numbers are put right by hand.
(That refusal holds for the whole process: a thread that waits for the device in the middle of a capture gets an error.)
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from keepbusy.runtime.graph.user_lines import line_of


class Uncapturable(Exception):  # noqa: N818 -- it is a finding, and always caught
    """Why a graph cannot stand in for the step, as the end of a sentence."""


def capture(
    run: Callable[[], Any], stream: torch.cuda.Stream, is_tidied: bool = True
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of what `run` enqueues, and what it returned. After an exception nothing is captured.

    `is_tidied`: whether garbage is collected and unused memory given back first, which takes a while.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    if is_tidied:
        gc.collect()
        torch.cuda.empty_cache()
    reason = ""
    with torch.cuda.stream(stream), _no_garbage(), _no_cached_casts():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with _no_syncs():
                result = run()
            graph.capture_end()
        except Exception as error:
            reason = _reason_of(error)
        except BaseException:
            _abandon(graph, pool)
            raise
        if reason:  # the error is gone by now, and with it the tensors that its traceback held
            _abandon(graph, pool)
            raise Uncapturable(reason)
    return graph, result


@contextmanager
def _no_syncs() -> Iterator[None]:
    """PyTorch itself raises where it would wait for the device. To be switched on after the capture has begun."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see every sync
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """What is collected in the middle of a capture may free memory or graphs, which breaks it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Weights that autocast has cast already would stay as they are in all replays, and the graph's own leak out."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that came to nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        try:
            graph.capture_end()
        except RuntimeError:  # it was invalid: PyTorch stopped before it told the allocator and the generator
            _INVALID_GRAPHS.append(graph)
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
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
    at = f"at {line} " if line else "somewhere "
    if _SYNC_MESSAGES.search(text):
        return (
            f"{at}the host waits for the device or copies from pageable memory, and a graph replays device work alone; "
            "move that out of the step, or read the value later"
        )
    return f"{at}capturing it failed with «{text}»"
