"""A ring sends the least, a tree takes the fewest steps: which is faster for whom, by their laws."""

from math import log2

HOP = 3.0  # microseconds from one GPU to the next
RATE = 350e3  # bytes a microsecond


def ring(ranks: int, size: float) -> float:
    """2 (n - 1) steps, each with one n-th of the tensor."""
    return 2 * (ranks - 1) * (HOP + size / ranks / RATE)


def tree(ranks: int, size: float) -> float:
    """Up to the root and down again. The tensor goes in many pieces, so that all levels work at the same time."""
    return 2 * log2(ranks) * HOP + 2 * size / RATE


for ranks in (4, 8, 64, 512):
    times = {size: (ring(ranks, size), tree(ranks, size)) for size in (2**10, 2**20, 2**26)}
    told = "   ".join(f"{size // 1024:6} KiB {a:6.0f} {b:6.0f} µs" for size, (a, b) in times.items())
    print(f"{ranks:4} ranks, ring and tree: {told}")
    assert times[2**10][1] <= times[2**10][0]  # a tree for what is small
assert ring(4, 2**26) < tree(4, 2**26)  # a ring for what is large
assert tree(512, 2**20) < ring(512, 2**20)  # and of many ranks, a tree for more
