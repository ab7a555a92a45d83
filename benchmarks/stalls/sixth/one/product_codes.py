"""Codes of 16 bytes for a million vectors of 128 numbers: a rotation, 256 centres for each eighth number on, and how often the nearest is still found."""
import argparse
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--vectors", type=int, default=1_000_000)
parser.add_argument("--rounds", type=int, default=16)
parser.add_argument("--centres", type=int, default=256)
options = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE, PARTS = 128, 16


def nearest(points, centres):
    """To which centre each point belongs; the points' own squares make no difference."""
    return torch.addmm(centres.square().sum(1), points, centres.T, alpha=-2).argmin(1)


def one_centre_after_the_other(points, belongs, centres):
    moved = centres.clone()
    for number in range(len(centres)):
        members = points[belongs == number]
        if len(members):
            moved[number] = members.mean(0)
    return moved


def all_centres_at_once(points, belongs, centres):
    sums = torch.zeros_like(centres).index_add_(0, belongs, points)
    counts = torch.zeros(len(centres), device=DEVICE).index_add_(0, belongs, torch.ones(len(points), device=DEVICE))[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), centres)


def k_means(points, count):
    centres = points[torch.randperm(len(points), device=DEVICE)[:count]].clone()
    for _ in range(options.rounds):
        belongs = nearest(points, centres)
        if options.fixed:
            centres = all_centres_at_once(points, belongs, centres)
        else:
            centres = one_centre_after_the_other(points, belongs, centres)
    return centres


torch.manual_seed(0)
start = time.perf_counter()

topics = torch.randn(2000, WIDE, device=DEVICE)
vectors = topics[torch.randint(0, len(topics), (options.vectors,), device=DEVICE)]
vectors += 0.6 * torch.randn(options.vectors, WIDE, device=DEVICE) * torch.linspace(2, 0.2, WIDE, device=DEVICE)
vectors -= vectors.mean(0)

# Principal axes, dealt out in turn so that every part has its share of what varies.
axes = torch.linalg.eigh(vectors.T @ vectors / len(vectors)).eigenvectors.flip(1)
rotation = axes[:, torch.arange(WIDE, device=DEVICE).view(-1, PARTS).T.flatten()]
parts = (vectors @ rotation).view(-1, PARTS, WIDE // PARTS).transpose(0, 1).contiguous()

books = torch.stack([k_means(part, options.centres) for part in parts])
codes = torch.stack([nearest(part, book) for part, book in zip(parts, books)], 1)
kept = torch.stack([book[code] for book, code in zip(books, codes.T)], 1).flatten(1)
lost = (kept - vectors @ rotation).square().sum(1).mean() / vectors.square().sum(1).mean()

asked = torch.randperm(len(vectors), device=DEVICE)[:512]
queries = vectors[asked] + 0.1 * torch.randn(len(asked), WIDE, device=DEVICE)
true = (queries @ vectors.T * 2 - vectors.square().sum(1)).argmax(1)
tables = (queries @ rotation).view(-1, PARTS, 1, WIDE // PARTS).sub(books).square().sum(-1)
distances = torch.zeros(len(asked), len(codes), device=DEVICE)
for part in range(PARTS):
    distances += tables[:, part, codes[:, part]]
found = (distances.topk(10, largest=False).indices == true[:, None]).any(1).float().mean()

print(f"lost {lost.item():.4f}, the nearest among the first ten {found.item():.3f}")
print(f"{time.perf_counter() - start:.3f}")
