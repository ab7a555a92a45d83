"""Cells in pictures from a microscope, found as DETR does: each of a fixed number of guesses is matched with one true cell, after every layer."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = 4  # the last one: no cell


class Detector(nn.Module):
    def __init__(self, wide, deep, guesses, edge):
        super().__init__()
        parts, now = [], 1
        for stage, channels in enumerate((wide // 4, wide // 2, wide, wide)):
            parts += [nn.Conv2d(now, channels, 3, 2, 1), nn.GroupNorm(8, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU()]
            now = channels
        self.backbone = nn.Sequential(*parts)
        self.places = nn.Parameter(0.1 * torch.randn((edge // 16) ** 2, wide))
        self.guesses = nn.Parameter(0.1 * torch.randn(guesses, wide))
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(wide, 8, 4 * wide, 0.0, batch_first=True, norm_first=True) for _ in range(deep))
        self.kinds, self.boxes = nn.Linear(wide, KINDS), nn.Linear(wide, 3)

    def forward(self, pictures):
        memory = self.backbone(pictures).flatten(2).mT + self.places
        x = self.guesses.expand(len(pictures), -1, -1)
        said = []
        for layer in self.layers:
            x = layer(x, memory)
            said.append((self.kinds(x).float(), self.boxes(x).float().sigmoid()))
        return said


class Criterion:
    """kinds [pictures, guesses, 4] and cells [pictures, guesses, 3] (where and how large) of each layer, against lists of true cells."""

    def match(self, kinds, cells, truth):
        pairs = []
        for number, (true_kinds, true_cells) in enumerate(truth):
            cost = torch.cdist(cells[number], true_cells, p=1) - kinds[number].softmax(-1)[:, true_kinds]
            guess, true = linear_sum_assignment(cost.cpu())
            pairs.append((torch.as_tensor(guess).to(DEVICE), torch.as_tensor(true).to(DEVICE)))
        return pairs

    def layer(self, kinds, cells, truth):
        pairs = self.match(kinds.detach(), cells.detach(), truth)
        wanted = torch.full(kinds.shape[:2], KINDS - 1, device=DEVICE)
        away = 0
        for number, ((guess, true), (true_kinds, true_cells)) in enumerate(zip(pairs, truth)):
            wanted[number, guess] = true_kinds[true]
            away = away + (cells[number, guess] - true_cells[true]).abs().sum()
        return F.cross_entropy(kinds.flatten(0, 1), wanted.flatten()) + away / sum(len(one) for one, _ in truth)

    def __call__(self, said, truth):
        return sum(self.layer(kinds, cells, truth) for kinds, cells in said)


class CriterionAtOnce(Criterion):
    """The costs of all layers and pictures come home in one copy, and the pairs go back in one."""

    def __call__(self, said, truth):
        kinds, cells = (torch.stack(part) for part in zip(*said))
        lengths = [len(one) for one, _ in truth]
        true_kinds, true_cells = (nn.utils.rnn.pad_sequence(part, batch_first=True) for part in zip(*truth))
        with torch.no_grad():
            chances = kinds.softmax(-1).gather(-1, true_kinds[None, :, None].expand(*kinds.shape[:3], -1))
            costs = (torch.cdist(cells, true_cells.expand(len(said), -1, -1, -1), p=1) - chances).cpu().numpy()
        rows = []
        for layer, of_pictures in enumerate(costs):
            for picture, (cost, length) in enumerate(zip(of_pictures, lengths)):
                guess, true = linear_sum_assignment(cost[:, :length])
                rows.append(np.stack([np.full_like(guess, layer), np.full_like(guess, picture), guess, true]))
        rows = torch.from_numpy(np.concatenate(rows, 1))
        layer, picture, guess, true = (rows.pin_memory() if DEVICE == "cuda" else rows).to(DEVICE, non_blocking=True)
        wanted = torch.full(kinds.shape[:3], KINDS - 1, device=DEVICE)
        wanted[layer, picture, guess] = true_kinds[picture, true]
        away = (cells[layer, picture, guess] - true_cells[picture, true]).abs().sum()
        return F.cross_entropy(kinds.flatten(0, 2), wanted.flatten()) * len(said) + away / sum(lengths)


def slides(count, batch, edge, most):
    """Round cells of three kinds; how many differs from picture to picture."""
    chance = torch.Generator().manual_seed(0)
    line = torch.linspace(0, 1, edge, device=DEVICE)
    for _ in range(count):
        truth, pictures = [], []
        for length in torch.randint(most // 3, most + 1, (batch,), generator=chance).tolist():
            kinds, cells = torch.randint(0, KINDS - 1, (length,), generator=chance).to(DEVICE), torch.rand(length, 3, generator=chance).to(DEVICE)
            x, y, size = cells.unbind(1)
            far = (line - x[:, None])[:, None].square() + (line - y[:, None])[:, :, None].square()
            pictures.append((far < (0.01 + 0.04 * size[:, None, None]).square()).mul(kinds[:, None, None] + 1.0).sum(0, keepdim=True))
            truth.append((kinds, cells))
        yield torch.stack(pictures), truth


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--steps", type=int, default=70)
    options = parser.parse_args()
    wide, deep, guesses, edge, batch, most, steps = (32, 2, 12, 32, 2, 6, 4) if options.tiny else (256, 6, 100, 256, 32, 30, options.steps)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Detector(wide, deep, guesses, edge).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    criterion, seen = (CriterionAtOnce if options.fixed else Criterion)(), list(slides(4, batch, edge, most))
    total = torch.zeros((), device=DEVICE)
    for step in range(steps):
        pictures, truth = seen[step % 4]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            said = model(pictures)
        loss = criterion(said, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(f"mean loss {total.item() / steps:.3f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
