"""`keepbusy.guard`: what waits is counted, each time, at its line; what does not wait is not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import keepbusy
from keepbusy import TooManyWaits
from keepbusy.fix.gate.guard import GuardedBlock
from keepbusy.timeline.files import BadInput

HERE = Path(__file__).name
X = torch.arange(6.0)
LARGE = torch.zeros(1 << 16)

SYNCS: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "item": (1, lambda x: x[0].item()),
    "float": (1, lambda x: float(x[0])),
    "truth": (1, lambda x: bool(x.sum() > 0)),
    "home": (1, lambda x: x.cpu()),
    "tolist": (1, lambda x: x.tolist()),
    "mask": (1, lambda x: x[x > 2]),
    "nonzero": (1, lambda x: x.nonzero()),
    "device": (1, lambda x: torch.cuda.synchronize()),
    "stream": (1, lambda x: torch.cuda.current_stream().synchronize()),
    "event": (1, lambda x: torch.cuda.current_stream().record_event().synchronize()),
    "three": (3, lambda x: [one.item() for one in x[:3]]),
}
COPIES: dict[str, Callable[[Tensor], object]] = {
    "there": lambda x: X.cuda(),
    "to": lambda x: X.to("cuda"),
    "new tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "in place": lambda x: x.copy_(X),
    "by indices of the host": lambda x: x[torch.arange(3)],
    "by a mask of the host": lambda x: x[X > 2],
    "into indices of the host": lambda x: x.index_put_((torch.arange(3),), x[0]),
    "pageable, asked not to block": lambda x: LARGE.to("cuda", non_blocking=True),
    "much data home": lambda x: torch.zeros(1 << 16, device="cuda").cpu(),
    "home into pageable memory, asked not to block": lambda x: torch.empty(1 << 16).copy_(
        torch.zeros(1 << 16, device="cuda"), non_blocking=True
    ),
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "computing": lambda x: (x * 2).sum(),
    "pinned": lambda x: LARGE.pin_memory().to("cuda", non_blocking=True),
    "home, asked not to block": lambda x: torch.zeros(1 << 16, device="cuda").to("cpu", non_blocking=True),
    "a type": lambda x: x.to(torch.float16),
    "so many classes": lambda x: torch.nn.functional.one_hot(x.long(), 6),
    "on the host": lambda x: X[0].item() + float(X.sum()),
    "readback": lambda x: keepbusy.readback(x.sum()),
    "prefetch": lambda x: list(keepbusy.prefetch([X, X, X])),
}


def counted(work: Callable[[], object], **limits: int | None) -> GuardedBlock:
    with keepbusy.guard(**{"syncs": None, "blocking_copies": None} | limits) as found:
        work()
    return found


@pytest.fixture
def x() -> Tensor:
    return X.cuda()


@pytest.mark.parametrize("name", SYNCS)
def test_each_sync_counts_at_its_line(x: Tensor, name: str) -> None:
    count, work = SYNCS[name]
    waits = counted(lambda: work(x)).waits
    assert [one.kind for one in waits] == ["sync"] * count
    assert {one.stack[0].file.rpartition("/")[2] for one in waits} == {HERE}
    assert all(one.duration is not None and one.duration > 0 for one in waits)


def test_the_largest_label_is_looked_for_unless_the_program_says_how_many_classes_there_are(x: Tensor) -> None:
    assert [one.kind for one in counted(lambda: torch.nn.functional.one_hot(x.long())).waits] == ["sync"]


@pytest.mark.parametrize("name", COPIES)
def test_each_blocking_copy_counts(x: Tensor, name: str) -> None:
    assert [one.kind for one in counted(lambda: COPIES[name](x)).waits] == ["blocking copy"]


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_passes(x: Tensor, name: str) -> None:
    with keepbusy.guard() as found:
        FREE[name](x)
    assert (found.waits, found.allowed) == ([], [])


def test_too_many_are_told_with_line_stack_and_cost(x: Tensor) -> None:
    def log(value: Tensor) -> float:
        return value.item()

    with pytest.raises(TooManyWaits) as raised:
        keepbusy.guard(syncs=1)(lambda: [log(x[0]), log(x[1])])()
    first, place, cost, caller, *_ = str(raised.value).splitlines()
    assert first.startswith("2 syncs where 1 may be; Python waited ")
    assert place.startswith("  ")
    assert place.endswith(" in log: return value.item()")
    assert cost.startswith("    2 syncs (Tensor.item); Python waited ")
    assert f"{HERE}:" in caller
    assert len(raised.value.waits) == 2


def test_a_decorated_function_is_guarded_at_each_call(x: Tensor) -> None:
    @keepbusy.guard(syncs=1)
    def step(reads: int) -> str:
        for _ in range(reads):
            x.sum().item()
        return "done"

    assert [step(1), step(1)] == ["done", "done"]
    with pytest.raises(TooManyWaits):
        step(2)


def test_an_allowed_place_needs_a_reason(x: Tensor) -> None:
    with keepbusy.guard(allow=[f"{HERE}: this test reads on purpose"]) as found:
        x[0].item()
    assert [reason for _, reason in found.allowed] == ["this test reads on purpose"]
    line = test_an_allowed_place_needs_a_reason.__code__.co_firstlineno
    with pytest.raises(TooManyWaits), keepbusy.guard(allow=[f"{HERE}:{line}: another line", "log(): elsewhere"]):
        x[0].item()
    with pytest.raises(BadInput, match="name a place and the reason"):
        keepbusy.guard(allow=["train.py"])


def test_the_backward_pass_belongs_to_who_starts_it(x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    loss = (leaf * 2).sum()
    leaf.register_hook(lambda gradient: gradient.sum().item() and None)
    assert len(counted(loss.backward).waits) == 1


def test_other_threads_are_not_counted(x: Tensor) -> None:
    read: list[float] = []
    other = threading.Thread(target=lambda: read.append(x[3].item()))
    with keepbusy.guard() as found:
        other.start()
        other.join()
    assert (read, found.waits) == ([3.0], [])


def test_guards_within_guards_each_count(x: Tensor) -> None:
    with keepbusy.guard(syncs=2) as outer:
        with keepbusy.guard(syncs=1) as inner:
            x[0].item()
        x[1].item()
    assert [len(inner.waits), len(outer.waits)] == [1, 2]


def test_an_error_passes_as_it_is(x: Tensor) -> None:
    with pytest.raises(ZeroDivisionError):
        keepbusy.guard()(lambda: x[0].item() / 0)()


@pytest.mark.parametrize("how", ["ignore", "error"])
def test_whatever_is_done_with_warnings_meanwhile(x: Tensor, how: str) -> None:
    def silenced() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(how)  # type: ignore[arg-type]
            x[0].item()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            x[0].item()
            warnings.warn("another", stacklevel=1)
        assert [str(one.message) for one in said] == ["another"]

    assert len(counted(silenced).waits) == 2


def test_everything_is_put_back(x: Tensor) -> None:
    before = Tensor.item, warnings.showwarning, warnings._showwarnmsg, list(warnings.filters), torch.cuda.synchronize
    with keepbusy.guard():
        assert Tensor.item is not before[0]
    after = Tensor.item, warnings.showwarning, warnings._showwarnmsg, list(warnings.filters), torch.cuda.synchronize
    assert after == before
    assert torch.cuda.get_sync_debug_mode() == 0
