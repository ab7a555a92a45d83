"""A DLRM for clicks: 40 categorical features in tables with sparse gradients, 13 numbers, SparseAdam for the tables; AUC in between."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import DEVICE, run, size, turns

FEATURES, NUMBERS, WIDE, BATCH = size(40, 4), 13, size(32, 8), size(16384, 16)


def table_sizes():
    rng = np.random.default_rng(0)
    return [int(rows) for rows in np.clip(10 ** rng.uniform(2, 6, FEATURES), 100, size(400000, 200))]


class Tables(nn.Module):
    """One table per feature."""

    def __init__(self, rows):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, WIDE, mode="sum", sparse=True) for count in rows)
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)

    def forward(self, ids):
        return torch.stack([table(ids[:, number, None]) for number, table in enumerate(self.tables)], 1)


class OneTable(nn.Module):
    """All features' rows one below the other."""

    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(sum(rows), WIDE, sparse=True)
        nn.init.uniform_(self.table.weight, -0.05, 0.05)
        self.register_buffer("first", torch.tensor([0, *rows[:-1]]).cumsum(0))

    def forward(self, ids):
        return self.table(ids + self.first)


def tower(*widths):
    layers = [layer for inner, outer in zip(widths, widths[1:]) for layer in (nn.Linear(inner, outer), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Clicks(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.bottom = tower(NUMBERS, size(512, 16), size(256, 16), WIDE)
        pairs = torch.triu_indices(FEATURES + 1, FEATURES + 1, 1)
        self.register_buffer("pairs", pairs[0] * (FEATURES + 1) + pairs[1])
        self.top = tower(WIDE + pairs.shape[1], size(512, 16), size(256, 16), 1)

    def forward(self, numbers, ids):
        dense = self.bottom(numbers)
        both = torch.cat([dense[:, None], self.tables(ids)], 1)
        products = (both @ both.mT).flatten(1)[:, self.pairs]
        return self.top(torch.cat([dense, products], 1))[:, 0]


class Log:
    """A day of clicks in device memory; ids follow a power law as real ones do."""

    def __init__(self, rows, count):
        with torch.device(DEVICE):
            self.numbers = torch.rand(count, NUMBERS).log1p()
            scale = torch.tensor(rows)
            self.ids = (torch.rand(count, FEATURES) ** 4 * scale).long().clamp(max=scale - 1)
            self.clicks = (torch.rand(count) < 0.2).float()

    def batch(self, step):
        span = slice(step * BATCH % len(self.ids), step * BATCH % len(self.ids) + BATCH)
        return self.numbers[span], self.ids[span], self.clicks[span]


def area_under_curve(scores, clicks):
    ranks = scores.argsort().argsort().double() + 1
    positive = clicks.sum()
    return (ranks[clicks.bool()].sum() - positive * (positive + 1) / 2) / (positive * (len(clicks) - positive))


def main(variant):
    rows = table_sizes()
    model = Clicks(OneTable(rows) if variant == "fixed" else Tables(rows)).to(DEVICE)
    sparse = torch.optim.SparseAdam(list(model.tables.parameters()), lr=1e-3)
    dense = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3, fused=DEVICE == "cuda")
    log, losses = Log(rows, 24 * BATCH), torch.zeros((), device=DEVICE)
    for step in range(turns(750, 4)):
        numbers, ids, clicks = log.batch(step)
        loss = F.binary_cross_entropy_with_logits(model(numbers, ids), clicks)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses += loss.detach()
        if step % 200 == 199:
            with torch.no_grad():
                numbers, ids, clicks = log.batch(step + 1)
                area = area_under_curve(model(numbers, ids), clicks)
            print(f"step {step + 1}: loss {losses.item() / 200:.4f}, AUC {area.item():.4f}")
            losses.zero_()


if __name__ == "__main__":
    run(main)
