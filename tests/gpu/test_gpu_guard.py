"""What `keepbusy.guard` counts on the virtual GPU it counts on a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import keepbusy

X = torch.arange(6.0)
LARGE = torch.zeros(1 << 16)
WAITS: dict[str, tuple[str, int, Callable[[Tensor], object]]] = {
    "item": ("sync", 1, lambda x: x[0].item()),
    "three": ("sync", 3, lambda x: [one.item() for one in x[:3]]),
    "mask": ("sync", 1, lambda x: x[x > 2]),
    "event": ("sync", 1, lambda x: torch.cuda.current_stream().record_event().synchronize()),
    "device": ("sync", 1, lambda x: torch.cuda.synchronize()),
    "home": ("sync", 1, lambda x: x.cpu()),
    "there": ("blocking copy", 1, lambda x: X.to("cuda")),
    "pageable, asked not to block": ("blocking copy", 1, lambda x: LARGE.to("cuda", non_blocking=True)),
    "pinned": ("", 0, lambda x: LARGE.pin_memory().to("cuda", non_blocking=True)),
    "computing": ("", 0, lambda x: (x * 2).sum()),
    "prefetch": ("", 0, lambda x: list(keepbusy.prefetch([X, X, X]))),
}


@pytest.mark.parametrize("name", WAITS)
def test_counted(name: str) -> None:
    kind, count, work = WAITS[name]
    x = X.cuda()
    with keepbusy.guard(syncs=None, blocking_copies=None) as found:
        work(x)
    assert [one.kind for one in found.waits] == [kind] * count


def test_the_backward_pass_is_counted_for_who_starts_it() -> None:
    leaf = X.cuda().requires_grad_()
    leaf.register_hook(lambda gradient: gradient.sum().item() and None)
    loss = (leaf * 2).sum()
    with keepbusy.guard(syncs=None) as found:
        loss.backward()
    assert len(found.waits) == 1


def test_a_wait_costs_what_the_device_still_had_to_do() -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        y = x @ x
    with keepbusy.guard(syncs=None) as found:
        y[0, 0].item()
    assert (found.waits[-1].duration or 0) > 5_000_000
