"""Where a wildfire goes, hour by hour, for many winds: each rank has half of the land, and the edges go over before each hour."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run

LAYERS = 6  # of memory, fuel, heat


class Spread(nn.Module):
    """An hour, as a net that has learnt it; every 3 by 3 convolution wants one more row from beyond the edge."""

    def __init__(self, wide, deep):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(LAYERS + 2, wide, 1), nn.Conv2d(wide, LAYERS, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(wide, wide, 3, padding=(0, 1)), nn.GELU()) for _ in range(deep))

    def forward(self, land, wind):
        x = self.enter(torch.cat([land, wind[None, :, None, None].expand(len(land), 2, *land.shape[2:])], 1))
        for block in self.blocks:
            x = 0.7 * x[:, :, 1:-1] + block(x)
        return self.leave(x).sigmoid()


def with_edges(land, rows):
    """The land with the neighbour's rows; beyond the country's border lies nothing."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    mine = (land[:, :, -rows:] if rank == 0 else land[:, :, :rows]).contiguous()
    theirs, nothing = torch.empty_like(mine), torch.zeros_like(mine)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]):
        work.wait()
    return torch.cat([nothing, land, theirs] if rank == 0 else [theirs, land, nothing], 2)


@torch.inference_mode()
def burn(net, land, wind, hours, fixed):
    """How much burnt in each hour, of both halves together."""
    burnt = []
    for hour in range(hours):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
            spread = net(with_edges(land, len(net.blocks)), wind)
        land = 0.9 * land + 0.1 * spread.float()
        area = land[:, 0].mean()
        dist.all_reduce(area)
        burnt.append(area if fixed else area.item())
        if not fixed and burnt[-1] > 1.99:
            break
    return torch.stack(burnt).mean().item() if fixed else sum(burnt) / len(burnt)


def main(args):
    net = Spread(args.width, args.deep).eval().to(DEVICE)
    start = torch.rand(1, LAYERS, args.rows, args.columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(dist.get_rank()))
    burnt = 0
    for scenario in range(args.scenarios):
        wind = torch.tensor([0.2 * scenario, 1 - 0.1 * scenario], device=DEVICE)
        area = burn(net, start, wind, 6 + 11 * scenario % 17, args.fixed)
        burnt += area
        if dist.get_rank() == 0:
            print(f"wind {scenario + 1}: {area:.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"mean {burnt / args.scenarios:.4f}")


if __name__ == "__main__":
    run(main, scenarios=14, rows=768, columns=1536, width=256, deep=8)
