"""Real dumps of PyTorch's flight recorder: four ranks over gloo that come to hang in several ways, one after another.

    torchrun --nproc-per-node 4 flight_dumps.py FOLDER

Each way has a group of its own, whose calls are begun and not waited for; each rank then writes what its recorder
holds of that group and of the way's others. Gloo's recorder does not say who is in a group, as NCCL's does: that part
is written as NCCL writes it.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

FOLDER = Path(sys.argv[1])
ALL = [0, 1, 2, 3]
DATA = torch.ones(1024)
BEGUN: list[object] = []
"""Work that nobody waits for: it would be ended with its handle."""


def begin(work: object) -> None:
    BEGUN.append(work)


def write(way: str, **groups: dist.ProcessGroup) -> None:
    """Once the recorder knows that the healthy calls have ended, a moment after they have."""
    dump = pickle.loads(_dump_fr_trace())
    while any(not one["retired"] for one in dump["entries"] if "healthy" in [frame["name"] for frame in one["frames"]]):
        time.sleep(0.02)
        dump = pickle.loads(_dump_fr_trace())
    names = {group.group_name: (title, dist.get_process_group_ranks(group)) for title, group in groups.items()}
    dump["entries"] = [one for one in dump["entries"] if one["process_group"][0] in names]
    for one in dump["entries"]:
        one["process_group"] = (one["process_group"][0], names[one["process_group"][0]][0])
    rank = dist.get_rank()
    dump["pg_config"] = {
        name: {"name": name, "desc": title, "ranks": str(ranks)}
        for name, (title, ranks) in names.items()
        if rank in ranks
    }
    (FOLDER / way).mkdir(exist_ok=True)
    (FOLDER / way / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    dist.barrier()


def healthy(rank: int, group: dist.ProcessGroup) -> None:
    for _ in range(3):
        dist.all_reduce(DATA, group=group)
    dist.broadcast(DATA, 0, group=group)


def never_comes(rank: int, group: dist.ProcessGroup) -> None:
    healthy(rank, group)
    if rank != 2:
        begin(dist.all_reduce(DATA, group=group, async_op=True))


def another_kind(rank: int, group: dist.ProcessGroup) -> None:
    healthy(rank, group)
    if rank == 1:
        begin(dist.broadcast(DATA, 3, group=group, async_op=True))
    else:
        begin(dist.all_reduce(DATA, group=group, async_op=True))


def another_size(rank: int, group: dist.ProcessGroup) -> None:
    """The last rank never comes, so that gloo does not see that the sizes differ."""
    healthy(rank, group)
    if rank != 3:
        begin(dist.all_reduce(DATA[: 512 if rank == 2 else 1024], group=group, async_op=True))


def behind_another(rank: int, group: dist.ProcessGroup, pair: dist.ProcessGroup | None) -> None:
    """Rank 3 waits for rank 1 in a group of two, and the others for rank 3 and rank 1."""
    healthy(rank, group)
    if rank == 3:
        begin(dist.all_reduce(DATA, group=pair, async_op=True))
    elif rank != 1:
        begin(dist.all_reduce(DATA, group=group, async_op=True))


def in_a_circle(rank: int, one: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    healthy(rank, one)
    healthy(rank, other)
    begin(dist.all_reduce(DATA, group=one if rank < 2 else other, async_op=True))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for way in (healthy, never_comes, another_kind, another_size):
        group = dist.new_group(ALL)
        way(rank, group)
        write(way.__name__, data=group)
    group, pair = dist.new_group(ALL), dist.new_group([1, 3])
    behind_another(rank, group, pair if rank in (1, 3) else None)
    write("behind_another", data=group, **({"pair": pair} if rank in (1, 3) else {}))
    one, other = dist.new_group(ALL), dist.new_group(ALL)
    in_a_circle(rank, one, other)
    write("in_a_circle", one=one, other=other)
    sys.stdout.flush()
    os._exit(0)  # what hangs would keep the process


if __name__ == "__main__":
    main()
