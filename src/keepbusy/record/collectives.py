"""What NCCL kernels say of themselves: their group and how many bytes they move."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from keepbusy.record.events import Collective
from keepbusy.timeline.model import Ints

_BITS = re.compile(r"(\d+)")
_NAMED = {"float": 4, "double": 8, "half": 2, "long": 8, "int": 4, "short": 2, "byte": 1, "char": 1, "bool": 1}


def groups_and_sizes(collectives: Sequence[Collective], rank: int) -> tuple[Ints, Ints]:
    """Of each collective, a number that all members of its group agree on, and its bytes. One more stands for none."""
    groups = [zlib.crc32(_members(one, rank).encode()) & 0x7FFFFFFF for one in collectives]
    sizes = [max(one.elements_in, one.elements_out) * bytes_of(one.dtype) for one in collectives]
    return np.array([*groups, 0], np.int64), np.array([*sizes, 0], np.int64)


def _members(one: Collective, rank: int) -> str:
    """A send and its receive meet between two ranks; everything else between all of the group."""
    if one.peer < 0:
        return f"{one.group}|{one.ranks}"
    mine = one.ranks.index(rank) if rank in one.ranks else rank
    return f"{one.group}|{one.ranks}|{min(mine, one.peer)}-{max(mine, one.peer)}"


def bytes_of(dtype: str) -> int:
    name = dtype.lower()
    if name in _NAMED:
        return _NAMED[name]
    bits = _BITS.search(name)
    return max(1, int(bits.group(1)) // 8) if bits else 1
