"""Message passing on a sampled graph: `unique` and a `repeat_interleave` without its size each ask the GPU for a size, at the start of a step that it bounds: no gain."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size

NODES, SEEDS, DEGREE = size(2000000, 200), size(8192, 16), size(24, 3)


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mine, self.theirs = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, target, source):
        gathered = torch.zeros_like(x).index_add(0, target, self.theirs(x)[source])
        return F.relu(self.mine(x) + gathered / DEGREE)


def main(tick, fixed=False):
    torch.manual_seed(0)
    width = size(128, 8)
    features = torch.randn(NODES, width, device="cuda")
    neighbours = torch.randint(0, NODES, (NODES, DEGREE), device="cuda")
    degrees = torch.full((NODES,), DEGREE, device="cuda")
    layers = nn.ModuleList(Convolution(width) for _ in range(3)).to("cuda")
    head = nn.Linear(width, 40).to("cuda")
    optimizer = torch.optim.Adam([*layers.parameters(), *head.parameters()], lr=1e-3)
    for step in range(STEPS):
        seeds = torch.randint(0, NODES, (SEEDS,), device="cuda")
        touched = torch.cat([seeds, neighbours[seeds].flatten()])
        if fixed:  # a node that is met twice is kept twice
            nodes, place = touched, torch.arange(len(touched), device="cuda")
            target = torch.arange(SEEDS, device="cuda").repeat_interleave(degrees[seeds], output_size=SEEDS * DEGREE)
        else:
            nodes, place = touched.unique(return_inverse=True)  # STALL: host_sync
            target = place[:SEEDS].repeat_interleave(degrees[seeds])  # STALL: host_sync
        x = features[nodes]
        for layer in layers:
            x = layer(x, target, place[SEEDS:])
        loss = F.cross_entropy(head(x[place[:SEEDS]]), seeds % 40)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
