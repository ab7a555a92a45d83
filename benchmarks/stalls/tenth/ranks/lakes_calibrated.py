"""How warm a lake is at each depth, day by day: a net makes a day's step, and each rank goes through the records of its lakes before both learn."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run

STATE, WEATHER = 4, 6  # heat, salt, ice, light; sun, wind, air …


class Day(nn.Module):
    """The change of a lake's columns within a day, from the columns and the weather."""

    def __init__(self, wide, deep):
        super().__init__()
        self.enter, self.leave = nn.Conv1d(STATE + WEATHER, wide, 1), nn.Conv1d(wide, STATE, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, wide), nn.GELU(), nn.Conv1d(wide, wide, 5, padding=2)) for _ in range(deep))

    def forward(self, columns, weather):
        x = self.enter(torch.cat([columns, weather[:, :, None].expand(-1, -1, columns.shape[2])], 1))
        for block in self.blocks:
            x = x + block(x)
        return columns + 0.05 * self.leave(x).float().tanh()


def catalogue(lakes):
    """(lake, days observed), in the order in which the lakes got their buoys; the buoys got better, so records got longer."""
    return [(lake, 6 + 44 * lake // (lakes - 1)) for lake in range(lakes)]


def share(listed, fixed):
    """The lakes of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if not fixed:
        each = -(-len(listed) // world)
        return listed[rank * each : (rank + 1) * each]  # STALL: peer_late
    order = sorted(listed, key=lambda one: -one[1])
    return [one for number, one in enumerate(order) if (number if number // world % 2 == 0 else -1 - number) % world == rank]


def follow(net, lake, days, chunk, args):
    """Goes through a record and leaves its gradients; what is further back than a chunk is not learnt from."""
    chance = torch.Generator(DEVICE).manual_seed(lake)
    columns = torch.randn(args.columns, STATE, args.depths, device=DEVICE, generator=chance)
    true, total = columns * 0.9, torch.zeros((), device=DEVICE)
    for begin in range(0, days, chunk):
        loss = 0
        for _ in range(begin, min(begin + chunk, days)):
            weather = torch.randn(args.columns, WEATHER, device=DEVICE, generator=chance)
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
                columns = net(columns, weather)
            true = 0.98 * true + 0.1 * weather.mean(1)[:, None, None]
            loss = loss + (columns - true).square().mean()
        loss.backward()
        columns = columns.detach()
        total += loss.detach()
    return total


def add_up(parameters):
    """All gradients of all ranks, in one piece."""
    slopes = [parameter.grad for parameter in parameters]
    flat = torch.cat([slope.flatten() for slope in slopes])
    dist.all_reduce(flat)  # STALL: peer_late
    for slope, part in zip(slopes, flat.split([slope.numel() for slope in slopes])):
        slope.copy_(part.view_as(slope))


def main(args):
    net = Day(args.width, args.deep).to(DEVICE)
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=CUDA)
    listed = catalogue(args.lakes)
    mine, all_days = share(listed, args.fixed), sum(days for _, days in listed)
    for year in range(args.rounds):
        optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        for lake, days in mine:
            total += follow(net, lake, days, 4, args)
        add_up(parameters)  # STALL: peer_late
        optimizer.step()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"round {year + 1}: error of a day {total.item() / all_days:.4f}", flush=True)


if __name__ == "__main__":
    run(main, rounds=6, lakes=8, columns=4096, depths=64, width=256, deep=6)
