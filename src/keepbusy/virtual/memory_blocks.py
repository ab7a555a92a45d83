"""Blocks of the device's memory, free or in use, and the pools of free ones."""

from __future__ import annotations

from bisect import bisect_left, insort

from keepbusy.virtual.memory_views import Use


class Block:
    """A part of a segment. Free ones lie in their pool's list."""

    __slots__ = (
        "address", "after", "allocated_in_backward", "before", "device", "free", "pool", "requested", "size", "stream",
        "users", "uses",
    )  # fmt: skip

    def __init__(self, device: int, stream: int, address: int, size: int, pool: Pool) -> None:
        self.device, self.stream, self.address, self.size, self.pool = device, stream, address, size, pool
        self.requested = 0
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None
        self.users: set[int] | None = None  # other streams that use it, by `record_stream`
        self.uses: list[Use] = []  # see `Accesses`
        self.allocated_in_backward = False  # as gradients are

    @property
    def split(self) -> bool:
        return self.before is not None or self.after is not None


class Pool:
    """Free blocks, of a stream each, by size and address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self._free: dict[int, list[tuple[int, int, Block]]] = {}

    def take(self, stream: int, size: int) -> Block | None:
        """The smallest block that is large enough."""
        blocks = self._free.get(stream)
        if not blocks:
            return None
        place = bisect_left(blocks, (size,))
        return blocks.pop(place)[2] if place < len(blocks) else None

    def add(self, block: Block) -> None:
        insort(self._free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self._free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def blocks(self, split: bool) -> list[Block]:
        """Free parts of segments in use (`split`), or free whole segments."""
        return [block for blocks in self._free.values() for _, _, block in blocks if block.split == split]


class Pools:
    """A pool of small and one of large blocks: the device's own two, or those of CUDA graphs that share memory."""

    def __init__(self) -> None:
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.graphs = 0  # how many graphs may still be replayed
        self.segments = 0
