"""`torch.cuda.set_sync_debug_mode` says which calls wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

TEXT = "called a synchronizing CUDA operation"
X = torch.arange(6.0)


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    yield X.cuda()
    torch.cuda.set_sync_debug_mode("default")


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "truth": lambda x: bool(x.sum() > 0),
    "home": lambda x: x.cpu(),
    "there": lambda x: X.cuda(),
    "blocking copy": lambda x: x.copy_(X),
    "new tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "print": lambda x: repr(x),
    "mask": lambda x: x[x > 2],
    "indices of the host": lambda x: x[torch.arange(3)],
    "nonzero": lambda x: x.nonzero(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}
PASSES: dict[str, Callable[[torch.Tensor], object]] = {
    "computing": lambda x: x * 2,
    "device": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "pinned": lambda x: x.copy_(X.pin_memory(), non_blocking=True),
    "pageable, asked not to block": lambda x: x.copy_(X, non_blocking=True),
    "home, asked not to block": lambda x: x.to("cpu", non_blocking=True),
    "to a peer": lambda x: x.to("cuda:1"),
}


@pytest.mark.parametrize("call", WAITS)
def test_a_call_that_waits_warns_at_its_line(x: torch.Tensor, call: str) -> None:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        WAITS[call](x)
    assert {str(one.message) for one in said} == {TEXT}
    assert said[0].category is UserWarning
    if call != "print":  # whose reads are PyTorch's own lines
        assert {one.filename for one in said} == {__file__}


@pytest.mark.parametrize("call", WAITS)
def test_or_fails_before_anything_is_copied(x: torch.Tensor, call: str) -> None:
    x.zero_()
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=f"^{TEXT}$"):
        WAITS[call](x)
    torch.cuda.set_sync_debug_mode("default")
    assert x.tolist() == [0.0] * 6


@pytest.mark.parametrize("call", PASSES)
def test_what_pytorch_does_not_see_passes(x: torch.Tensor, call: str) -> None:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        PASSES[call](x)
    assert said == []
    torch.cuda.set_sync_debug_mode("error")
    PASSES[call](x)


def test_the_mode_can_be_asked_for(x: torch.Tensor) -> None:
    torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == 2
    with pytest.raises(RuntimeError, match="expected one of"):
        torch._C._cuda_set_sync_debug_mode(3)
