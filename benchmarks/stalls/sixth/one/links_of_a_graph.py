"""ComplEx learns a graph of facts; after each epoch tails of held-out facts are ranked, other true tails left out, and the vectors are saved."""
import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ComplEx(nn.Module):
    def __init__(self, things, relations, wide):
        super().__init__()
        self.things, self.relations = nn.Embedding(things, 2 * wide), nn.Embedding(relations, 2 * wide)
        nn.init.normal_(self.things.weight, std=0.05)
        nn.init.normal_(self.relations.weight, std=0.05)

    def forward(self, heads, relations):
        """The score of each thing as the tail."""
        a, b = self.things(heads).chunk(2, -1)
        c, d = self.relations(relations).chunk(2, -1)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return F.linear(torch.cat([a * c - b * d, a * d + b * c], 1), self.things.weight)


def facts(count, things, relations):
    """Some heads and relations are far more frequent than others, as in any such graph."""
    chance = torch.Generator().manual_seed(5)
    heads = (torch.rand(count, generator=chance) ** 3 * things).long()
    kinds = (torch.rand(count, generator=chance) ** 2 * relations).long()
    tails = (heads * 31 + kinds * 97 + (torch.rand(count, generator=chance) ** 4 * 300).long()) % things
    return torch.stack([heads, kinds, tails], 1)


class Ranking:
    """How far up the true tail stands among all things but the other true tails."""

    def __init__(self, known, held_out, batch):
        self.true = defaultdict(list)
        for head, kind, tail in known.tolist():
            self.true[head, kind].append(tail)
        self.batches = held_out.to(DEVICE).split(batch)

    def __call__(self, model):
        above = []
        for batch in self.batches:
            scores = model(batch[:, 0], batch[:, 1]).float()
            for row, (head, kind, tail) in enumerate(batch.tolist()):
                own = scores[row, tail].clone()
                scores[row, self.true[head, kind]] = -torch.inf
                above.append((scores[row] > own).sum().item())
        ranks = torch.tensor(above, dtype=torch.double) + 1
        return (1 / ranks).mean().item(), (ranks <= 10).double().mean().item()


class RankingByBatch(Ranking):
    """What to leave out is written down once, and no rank is read before the last."""

    def __init__(self, known, held_out, batch):
        super().__init__(known, held_out, batch)
        self.out = []
        for part in held_out.split(batch):
            pairs = [(row, other) for row, (head, kind, _) in enumerate(part.tolist()) for other in self.true[head, kind]]
            self.out.append(torch.tensor(pairs, device=DEVICE).T)

    def __call__(self, model):
        above = []
        for batch, (rows, others) in zip(self.batches, self.out):
            scores = model(batch[:, 0], batch[:, 1]).float()
            own = scores.gather(1, batch[:, 2:])
            scores[rows, others] = -torch.inf
            above.append((scores > own).sum(1))
        ranks = torch.cat(above).double() + 1
        return (1 / ranks).mean().item(), (ranks <= 10).double().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--facts", type=int, default=260_000)
    parser.add_argument("--things", type=int, default=60_000)
    parser.add_argument("--held-out", type=int, default=10_240)
    options = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    known = facts(options.facts, options.things, 200)
    held_out = known[:: len(known) // options.held_out][: options.held_out]
    ranking = (RankingByBatch if options.fixed else Ranking)(known, held_out, 512)
    model = ComplEx(options.things, 200, 256).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=DEVICE == "cuda")
    known = known.to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(options.epochs):
            total, batches = torch.zeros((), device=DEVICE), known[torch.randperm(len(known), device=DEVICE)].split(4096)
            for batch in batches:
                loss = F.cross_entropy(model(batch[:, 0], batch[:, 1]).float(), batch[:, 2], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            with torch.no_grad():
                reciprocal, first_ten = ranking(model)
            print(f"epoch {epoch}: loss {total.item() / len(batches):.4f}, mean reciprocal rank {reciprocal:.4f}, among the first ten {first_ten:.4f}")
            torch.save({"epoch": epoch, "model": model.state_dict()}, Path(folder, "last.pt"))
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
