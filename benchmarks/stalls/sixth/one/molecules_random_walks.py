"""An energy per molecule by a graph attention net; nodes carry how likely a random walk returns to them. Epochs, validation, the best is saved."""
import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, global_add_pool
from torch_geometric.transforms import AddRandomWalkPE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS, BONDS, WALK = 12, 4, 24


class Molecules(InMemoryDataset):
    """Trees with some rings closed; the energy depends on kinds, bonds and rings."""

    def __init__(self, root, count, **transforms):
        self.count = count
        super().__init__(root, **transforms)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self):
        return ["molecules.pt"]

    def process(self):
        chance, kept = torch.Generator().manual_seed(3), []
        for _ in range(self.count):
            atoms = int(torch.randint(24, 90, (1,), generator=chance))
            child = torch.arange(1, atoms)
            parent = (torch.rand(atoms - 1, generator=chance) ** 0.3 * child).long()
            rings = torch.randint(0, atoms, (2, atoms // 10), generator=chance)
            edges = torch.cat([torch.stack([child, parent]), rings], 1)
            bonds = torch.randint(0, BONDS, (edges.shape[1],), generator=chance)
            kinds = torch.randint(0, KINDS, (atoms,), generator=chance)
            energy = (kinds.float().mean() - 5.5) + 0.3 * bonds.float().mean() + 0.1 * rings.shape[1]
            both = torch.cat([edges, edges.flip(0)], 1)
            kept.append(Data(kinds=kinds, edge_index=both, bonds=bonds.repeat(2), y=energy.view(1), num_nodes=atoms))
        if self.pre_transform is not None:
            kept = [self.pre_transform(one) for one in kept]
        self.save(kept, self.processed_paths[0])


class Energy(nn.Module):
    def __init__(self, wide, deep, heads=4):
        super().__init__()
        self.kind, self.bond, self.walks = nn.Embedding(KINDS, wide), nn.Embedding(BONDS, wide), nn.Linear(WALK, wide)
        self.layers = nn.ModuleList(GATv2Conv(wide, wide // heads, heads, edge_dim=wide, add_self_loops=False) for _ in range(deep))
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(deep))
        self.head = nn.Sequential(nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, 1))

    def forward(self, batch):
        x, edges = self.kind(batch.kinds) + self.walks(batch.walks), self.bond(batch.bonds)
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.silu(layer(norm(x), batch.edge_index, edges))
        return self.head(global_add_pool(x, batch.batch, batch.num_graphs) / 50)[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--molecules", type=int, default=1792)
    parser.add_argument("--wide", type=int, default=256)
    options = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    walks = AddRandomWalkPE(WALK, attr_name="walks")
    with tempfile.TemporaryDirectory() as folder:
        if options.fixed:
            molecules = Molecules(folder, options.molecules, pre_transform=walks)
        else:
            molecules = Molecules(folder, options.molecules, transform=walks)
        split = len(molecules) * 7 // 8
        training = DataLoader(molecules[:split], batch_size=32, shuffle=True, drop_last=True, pin_memory=DEVICE == "cuda")
        validation = DataLoader(molecules[split:], batch_size=32, pin_memory=DEVICE == "cuda")
        model = Energy(options.wide, 6).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=DEVICE == "cuda")
        best = float("inf")
        for epoch in range(options.epochs):
            model.train()
            total = torch.zeros((), device=DEVICE)
            for batch in training:
                batch = batch.to(DEVICE, non_blocking=True)
                loss = F.smooth_l1_loss(model(batch), batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            model.eval()
            off = torch.zeros((), device=DEVICE)
            with torch.no_grad():
                for batch in validation:
                    batch = batch.to(DEVICE, non_blocking=True)
                    off += (model(batch) - batch.y).abs().sum()
            error = off.item() / (len(molecules) - split)
            print(f"epoch {epoch}: loss {total.item() / len(training):.4f}, error {error:.4f}")
            if error < best:
                best = error
                torch.save(model.state_dict(), Path(folder, "best.pt"))
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
