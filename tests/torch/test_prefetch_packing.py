"""Any tree of tensors arrives bit for bit, laid out as `Tensor.to` lays it out, and aligned."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

import keepbusy
from keepbusy.runtime.prefetch import prefetch_iterator
from keepbusy.runtime.prefetch.batch_layout import (
    ALIGNMENT,
    BUFFERS,
    DIRECT_COPY_BYTES,
    BatchLayouts,
    WorkerBuffers,
    layout_of,
    pieces,
)

Pair = namedtuple("Pair", "first second")
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


@dataclass
class Record:
    value: Any
    note: str = "note"


def raw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaNs of all kinds among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    noise = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return noise.to(torch.uint8).view(dtype).reshape(shape)


LAYOUTS = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.permute(tuple(reversed(range(x.ndim)))),
    "with gaps": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2] if x.ndim else x,
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "from the middle": lambda x: x[1:] if x.ndim and len(x) else x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last) if x.ndim == 4 else x,
}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](
        raw(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    )
    return tensor.pin_memory() if draw(st.booleans()) else tensor


LEAVES = tensors() | st.none() | st.integers() | st.text(max_size=3)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner)
    ),
    max_leaves=12,
)


def strides(tensor: Tensor) -> list[int]:
    """Those that matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


def same(one: Any, other: Any) -> bool:
    """The same structure, types, layouts and bits."""
    if isinstance(one, Record):
        return type(other) is Record and other.note == one.note and same(one.value, other.value)
    if isinstance(one, Tensor):
        facts = [(x.dtype, x.shape, strides(x)) for x in (one.to("cuda"), other)]
        bits = [
            x.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for x in (one, other)
        ]
        return other.is_cuda and facts[0] == facts[1] and torch.equal(*bits)
    if isinstance(one, dict):
        return type(other) is dict and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


@settings(max_examples=50)
@given(st.lists(TREES, max_size=4))
def test_any_tree_arrives_bit_for_bit(batches: list[Any]) -> None:
    got = list(keepbusy.prefetch(batches))
    assert same(batches, got)


@pytest.mark.parametrize("compiles", [True, False])
def test_megabytes_arrive_bit_for_bit_by_however_many_tasks(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or in parts, of eight bytes or their own, from odd places, with bits that PyTorch has not applied."""

    def batch(seed: int) -> list[Any]:
        many = raw((1 << 22,), torch.uint8, seed)
        return [
            many[3 + seed : 2_500_003 + seed], many[1:40_008], raw((40_001,), torch.float16, seed),
            raw((300, 300), torch.float32, seed).t(), raw((3, 8, 80, 80), torch.float32, seed)[:, ::2],
            raw((4, 8, 60, 60), torch.float32, seed).to(memory_format=torch.channels_last),
            raw((50_000,), torch.complex64, seed).conj(), torch._neg_view(raw((40_000,), torch.float32, seed)),
            *[raw((seed, 2), torch.int64, seed) for _ in range(50)],
        ]  # fmt: skip

    begun: list[int] = []
    compiled = prefetch_iterator._script()
    counted = SimpleNamespace(begin=lambda *arguments: begun.append(arguments[-1]) or compiled.begin(*arguments))
    monkeypatch.setattr(prefetch_iterator, "_script", lambda: counted if compiles else None)
    batches = [batch(seed) for seed in (5, 5, 5, 6, 5)]
    assert same(batches, list(keepbusy.prefetch(batches)))
    assert len(begun) == (5 if compiles else 0)
    assert 1 not in begun


def test_the_loader_may_fill_its_memory_again() -> None:
    def loader() -> Iterator[list[Tensor]]:
        batch = [torch.empty(3000, dtype=torch.int64) for _ in range(40)] + [torch.empty(200_000)]
        for index in range(12):
            yield [one.fill_(index) for one in batch]

    for index, batch in enumerate(keepbusy.prefetch(loader())):
        assert all(bool((one == index).all()) for one in batch)
    assert index == 11


def test_nothing_of_a_loader_is_read_once_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def loader() -> Iterator[Tensor]:
        try:
            while True:
                yield torch.ones(200_000)
        finally:
            said.append("closed")

    wait = prefetch_iterator.PinnedBuffer.wait

    def waited(buffer: prefetch_iterator.PinnedBuffer) -> None:
        said.extend(["waited"] if buffer._packing is not None else [])
        wait(buffer)

    monkeypatch.setattr(prefetch_iterator.PinnedBuffer, "wait", waited)
    for _ in keepbusy.prefetch(loader()):
        break
    assert said == ["waited", "waited", "waited", "closed"]


def test_packing_is_compiled_where_functions_of_pytorch_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recorder replaces them: on an H200 a batch of 16 MB met that for the first time."""
    native = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", wraps(native)(lambda *given: native(*given)))
    prefetch_iterator._script.cache_clear()
    target = torch.zeros(3)
    assert prefetch_iterator._script().begin([target], [torch.ones(3)], [], 4).wait() == 4
    assert target.sum() == 3


@settings(max_examples=100)
@given(st.lists(tensors(), min_size=1, max_size=20))
def test_tensors_are_aligned_and_do_not_touch(found: list[Tensor]) -> None:
    layout = layout_of(found)
    memory = torch.empty(layout.size, dtype=torch.uint8)
    placed = pieces(memory, layout)
    bounds = sorted((one.data_ptr() - memory.data_ptr(), one.nbytes) for one in placed if one.numel())
    assert all(start % ALIGNMENT == 0 for start, _ in bounds)
    ends = [start + size for start, size in bounds]
    assert all(end <= start for end, (start, _) in zip(ends, bounds[1:], strict=False))
    assert not ends or ends[-1] <= layout.size


def test_large_pinned_tensors_stand_behind_what_is_packed() -> None:
    small, large = torch.zeros(3), torch.zeros(DIRECT_COPY_BYTES // 4).pin_memory()
    turned = torch.zeros(512, 512)[:, ::2].pin_memory()
    layout = layout_of([large, small, turned, large.clone()])
    assert layout.order == [1, 3, 0, 2]  # pinning closed the gaps of the third; the fourth is pageable
    assert (layout.together, layout.packed, layout.pageable) == (2, ALIGNMENT + DIRECT_COPY_BYTES, DIRECT_COPY_BYTES)


def test_batches_that_look_the_same_share_their_layout() -> None:
    assert layout_of([torch.zeros(3), torch.ones(2)]) is layout_of([torch.ones(3), torch.zeros(2)])
    assert layout_of([torch.zeros(3)]) is not layout_of([torch.zeros(3, dtype=torch.float64)])


def test_a_batch_like_the_one_before_is_known_without_a_look_at_each_tensor() -> None:
    def batch() -> list[Any]:
        return [torch.zeros(3, 4), "text", torch.zeros(5, dtype=torch.int64)]

    layouts = BatchLayouts()
    places, others, layout = layouts.of(batch())
    assert (places, others) == ([0, 2], [1])
    for _ in range(3):
        assert layouts.of(batch()) == (places, others, layout)
    unlike: list[Any] = [
        torch.zeros(4, 4), torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.int32),
        torch.zeros(3, 4, device="cuda"), torch.zeros(3, 4, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3, 4)), torch.zeros(3, 4).to_sparse(), None,
    ]  # fmt: skip
    for other in unlike:
        for _ in range(3):
            layouts.of(batch())  # by the third its likes are known by one call
        leaves = [other, *batch()[1:]]
        assert layouts.of(leaves) == BatchLayouts().of(leaves)
        assert layouts.of(leaves) != (places, others, layout)


def test_a_tree_without_tensors_stays_what_it_is() -> None:
    batch = {"a": [1, None], "b": ("c", Record(3))}
    (got,) = keepbusy.prefetch([batch])
    assert got == batch
    assert tree_leaves(got)[0] == 1


# buffers of workers


def test_a_worker_fills_a_buffer_again_once_it_is_given_back() -> None:
    buffers = WorkerBuffers()
    first, second = buffers.take(1000), buffers.take(1000)
    first.fill_(1)
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    first.untyped_storage()[0] = 0  # it is given back
    again, larger = buffers.take(900), buffers.take(5000)
    assert again.data_ptr() == first.data_ptr()
    assert (len(again), len(larger)) == (900, 5000)
    assert (second.is_shared(), larger.is_shared()) == (True, True)


def test_buffers_that_nobody_gives_back_are_not_kept_for_ever() -> None:
    buffers = WorkerBuffers()
    taken = [buffers.take(600) for _ in range(3 * BUFFERS)]
    assert len({one.data_ptr() for one in taken}) == 3 * BUFFERS
    assert len(buffers.made) == BUFFERS


def test_memory_for_batches_is_the_hosts_also_where_new_tensors_go_to_the_device() -> None:
    batch = [torch.ones(3), torch.ones(5)]
    pinned, layout = prefetch_iterator.PinnedBuffer(), layout_of(batch)
    with torch.device("cuda"):
        shared = WorkerBuffers().take(1000)
        pinned.pack(layout, batch)
    assert (shared.device.type, pinned.memory.device.type) == ("cpu", "cpu")
    assert [one.tolist() for one in pieces(pinned.memory, layout)] == [[1.0] * 3, [1.0] * 5]


def columns(number: int) -> dict[str, Tensor]:
    return {f"column {place}": torch.full((4000 + place,), 100 * number + place) for place in range(30)}


class Numbered(Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return columns(number)


def test_no_buffer_is_filled_while_its_batch_may_be_read() -> None:
    """Sixty batches of a megabyte, from two workers that have eight buffers each; some are kept for long."""
    batches = iter(keepbusy.prefetch(DataLoader(Numbered(), batch_size=None, num_workers=2), depth=3))
    kept = []
    for number, batch in enumerate(batches):
        kept += [(number, batch)] if number % 5 == 0 else []
        for name, expected in columns(number).items():
            assert torch.equal(batch[name].cpu(), expected)
    assert len(kept) == 12
    for number, batch in kept:
        assert all(torch.equal(batch[name].cpu(), expected) for name, expected in columns(number).items())
