"""Blocks of device memory, and the pools that they wait in while they are free."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A part of a segment. Free ones lie in their pool's list."""

    __slots__ = ("address", "after", "before", "device", "free", "pool", "requested", "size", "stream", "users")

    def __init__(self, device: int, stream: int, address: int, size: int, pool: Pool) -> None:
        self.device, self.stream, self.address, self.size, self.pool = device, stream, address, size, pool
        self.requested = 0
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None
        self.users: set[int] | None = None  # other streams that use it

    @property
    def small(self) -> bool:
        return self.pool.small

    def __lt__(self, other: Block) -> bool:
        return self.address < other.address

    @property
    def split(self) -> bool:
        return self.before is not None or self.after is not None


class Pool:
    """Free blocks, of a stream each, by size and address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: dict[int, list[tuple[int, int, Block]]] = {}

    def take(self, stream: int, size: int) -> Block | None:
        """The smallest that is large enough."""
        blocks = self.free.get(stream)
        if not blocks:
            return None
        place = bisect_left(blocks, (size,))
        return blocks.pop(place)[2] if place < len(blocks) else None

    def add(self, block: Block) -> None:
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def whole_segments(self) -> list[Block]:
        return [block for blocks in self.free.values() for _, _, block in blocks if not block.split]


class Pools:
    """A pool of small and one of large blocks: the device's own two, or those of CUDA graphs that share memory."""

    def __init__(self) -> None:
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.both = (self.large, self.small)
        self.graphs = 0  # that may still be replayed
        self.segments = 0


def split(block: Block, size: int) -> None:
    """Keep so much of it, and give the rest to its pool."""
    rest = Block(block.device, block.stream, block.address + size, block.size - size, block.pool)
    rest.before, rest.after = block, block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.size = rest, size
    block.pool.add(rest)


def merged(block: Block, other: Block) -> Block:
    """One block of two neighbours: the first of them, grown."""
    first, second = (other, block) if other.address < block.address else (block, other)
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    first.free = True
    return first
