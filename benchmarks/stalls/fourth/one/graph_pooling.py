"""Graphs of 60 to 340 nodes, regressed by a GIN; each graph's nodes are picked by a mask to pool them, and gradients' norms are kept per layer."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.utils.data import DataLoader, Dataset

from models import size

BATCH, FEATURES, WIDTH, LAYERS = size(128, 3), 16, size(512, 16), size(5, 2)
SMALLEST, LARGEST = size(60, 4), size(340, 9)


class Graphs(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.count, self.graphs = count, []
        for _ in range(256):
            nodes = int(rng.integers(SMALLEST, LARGEST))
            edges = torch.from_numpy(rng.integers(0, nodes, (2, 4 * nodes)))
            self.graphs.append((torch.from_numpy(rng.standard_normal((nodes, FEATURES), dtype=np.float32)), edges, float(nodes) / LARGEST))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.graphs[index * 37 % len(self.graphs)]


def collate(graphs):
    counts = torch.tensor([len(nodes) for nodes, _, _ in graphs])
    starts = counts.cumsum(0) - counts
    edges = torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts)], 1)
    return torch.cat([nodes for nodes, _, _ in graphs]), edges, torch.arange(len(graphs)).repeat_interleave(counts), torch.tensor([y for _, _, y in graphs])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm, self.self_weight = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(()))

    def forward(self, h, edges):
        gathered = ((1 + self.self_weight) * h).index_add(0, edges[1], h.index_select(0, edges[0]))
        return h + F.relu(self.norm(self.mix(gathered)))


class Regressor(nn.Module):
    def __init__(self, scatter):
        super().__init__()
        self.embed, self.layers = nn.Linear(FEATURES, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head, self.scatter = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)), scatter

    def pool(self, h, owner, count):
        if self.scatter:
            index = owner[:, None].expand_as(h)
            zeros = h.new_zeros(count, h.shape[1])
            mean = zeros.scatter_reduce(0, index, h, "mean", include_self=False)
            return torch.cat([mean, zeros.scatter_reduce(0, index, h, "amax", include_self=False)], 1)
        out = []
        for graph in range(int(owner.max()) + 1):  # STALL: host_sync
            nodes = h[owner == graph]  # STALL: host_sync
            out.append(torch.cat([nodes.mean(0), nodes.amax(0)]))
        return torch.stack(out)

    def forward(self, x, edges, owner, count):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, edges)
        return self.head(self.pool(h, owner, count))[:, 0]


def main(tick, fixed=False):
    """`fixed` may also be "pooling" or "norms", to mend one of the two alone."""
    pooling, unread = fixed in (True, "pooling"), fixed in (True, "norms")
    torch.manual_seed(0)
    steps = turns(230, 2)
    with torch.device(DEVICE):
        model = Regressor(pooling)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    norms, losses = [], []
    loader = DataLoader(Graphs(BATCH * steps), BATCH, shuffle=True, num_workers=size(8, 1), collate_fn=collate, pin_memory=DEVICE == "cuda")
    for batch in loader:
        x, edges, owner, y = (tensor.to(DEVICE, non_blocking=True) for tensor in batch)
        loss = F.l1_loss(model(x, edges, owner, len(y)), y)
        optimizer.zero_grad()
        loss.backward()
        if unread:
            norms.append(torch.stack(torch._foreach_norm([parameter.grad for parameter in model.parameters()])))
        else:
            norms.append([parameter.grad.norm().item() for parameter in model.parameters()])  # STALL: host_sync
        optimizer.step()
        losses.append(loss.detach())
        tick()
    assert torch.stack(losses).isfinite().all()


if __name__ == "__main__":
    run(main)
