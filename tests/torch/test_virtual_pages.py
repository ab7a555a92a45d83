"""Which memory of the host was touched before."""

from __future__ import annotations

from keepbusy.virtual.pytorch.tensors import Pages


class Result:
    """Something that holds memory."""


def test_what_is_freed_is_handed_out_again() -> None:
    pages, result = Pages(mapped=1_000), Result()
    assert pages.take(100, result) == 100
    del result
    assert pages.take(80, Result()) == 0
    assert pages.take(120, Result()) == 20


def test_what_is_kept_is_not() -> None:
    pages = Pages(mapped=1_000)
    kept = [Result() for _ in range(5)]
    assert [pages.take(100, one) for one in kept] == [100] * 5


def test_large_blocks_are_mapped_anew_each_time() -> None:
    pages = Pages(mapped=1_000)
    assert [pages.take(1_000, Result()) for _ in range(3)] == [1_000] * 3
