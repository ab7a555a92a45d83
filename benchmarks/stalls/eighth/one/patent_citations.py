"""Which class a patent belongs to, from those it cites and those which they cite: GraphSAGE over sampled neighbours."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES, FANS = 40, (10, 8)


class Graph:
    """Citations as rows of one long list, features and classes of the patents."""

    def __init__(self, patents, cited, wide):
        rng = np.random.default_rng(0)
        counts = rng.integers(1, 2 * cited, patents)
        self.ends = np.concatenate([[0], np.cumsum(counts)])
        self.cited = rng.integers(0, patents, self.ends[-1])
        self.classes = torch.from_numpy(rng.integers(0, CLASSES, patents))
        self.features = torch.from_numpy(rng.standard_normal((patents, wide), dtype=np.float32))
        self.features[torch.arange(patents), self.classes % wide] += 2

    def sample(self, patents, count, rng):
        first, last = self.ends[patents, None], self.ends[patents + 1, None]
        return self.cited[first + (rng.random((len(patents), count)) * (last - first)).astype(np.int64)]


class Neighbourhoods:
    """Makes of some patents a batch: all that were sampled, once each, and where the neighbours of each are among them."""

    def __init__(self, graph, with_features):
        self.graph, self.with_features = graph, with_features

    def __call__(self, patents):
        rng = np.random.default_rng(patents[0])
        known, places = np.array(patents), []
        for fan in FANS:
            neighbours = self.graph.sample(known, fan, rng)
            more, where = np.unique(np.concatenate([known, neighbours.ravel()]), return_inverse=True)
            places.insert(0, (torch.from_numpy(where[: len(known)]), torch.from_numpy(where[len(known) :].reshape(-1, fan))))
            known = more
        known = torch.from_numpy(known)
        features = self.graph.features[known] if self.with_features else known
        return features, places, self.graph.classes[torch.tensor(patents)]


class Sage(nn.Module):
    def __init__(self, entering, wide):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(entering, wide), nn.GELU(), nn.Linear(wide, wide))
        self.own = nn.ModuleList(nn.Linear(wide, wide) for _ in FANS)
        self.others = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in FANS)
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, features, places):
        x = self.enter(features)
        for (mine, neighbours), own, others in zip(places, self.own, self.others):
            x = F.gelu(own(x[mine]) + others(F.embedding(neighbours, x).mean(1)))
        return self.head(x)


def loader(graph, batch, fixed):
    order = torch.randperm(len(graph.classes)).tolist()
    if fixed:
        return DataLoader(order, batch, collate_fn=Neighbourhoods(graph, False), num_workers=10, pin_memory=DEVICE == "cuda", prefetch_factor=3)
    return DataLoader(order, batch, collate_fn=Neighbourhoods(graph, True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=110)
    options = parser.parse_args()
    patents, entering, wide, batch = (2000, 16, 16, 20) if options.tiny else (300_000, 128, 1024, 2048)
    torch.manual_seed(0)
    start = time.perf_counter()
    graph = Graph(patents, 12, entering)
    model = Sage(entering, wide).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    table = graph.features.to(DEVICE) if options.fixed else None
    right = torch.zeros((), device=DEVICE)
    for turn, (features, places, classes) in enumerate(loader(graph, batch, options.fixed)):
        if turn == options.turns:
            break
        if options.fixed:
            features = table[features.to(DEVICE, non_blocking=True)]
        else:
            features = features.to(DEVICE)
        places = [(mine.to(DEVICE, non_blocking=True), others.to(DEVICE, non_blocking=True)) for mine, others in places]
        classes = classes.to(DEVICE, non_blocking=True)
        said = model(features, places)
        loss = F.cross_entropy(said, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (said.argmax(1) == classes).float().mean()
        if turn % 40 == 39:
            print(f"{turn + 1}: loss {loss.item():.4f}, right {right.item() / (turn + 1):.4f}")
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
