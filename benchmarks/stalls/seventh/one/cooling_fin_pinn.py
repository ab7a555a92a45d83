"""Heat in a cooling fin as a net that obeys its equation, fitted by L-BFGS; before each round the points where it obeys least are sought among very many."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from scipy.stats import qmc

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Fin(nn.Module):
    def __init__(self, wide, deep):
        super().__init__()
        widths = [3, *[wide] * deep]
        self.layers = nn.ModuleList(nn.Linear(inner, outer) for inner, outer in zip(widths, widths[1:]))
        self.head = nn.Linear(wide, 1)

    def forward(self, points):
        x = points
        for layer in self.layers:
            x = torch.tanh(layer(x))
        along, across, t = points.unbind(1)
        return torch.exp(-3 * along) + t * along * (1 - across.square()) * self.head(x)[:, 0]


def residual(net, points):
    """Of the heat equation with a conductivity that falls with temperature and losses to the air."""
    points = points.detach().requires_grad_()
    heat = net(points)
    slope = torch.autograd.grad(heat.sum(), points, create_graph=True)[0]
    flows = (1 - 0.2 * heat)[:, None] * slope[:, :2]
    spread = sum(torch.autograd.grad(flows[:, axis].sum(), points, create_graph=True)[0][:, axis] for axis in range(2))
    return slope[:, 2] - 0.1 * spread + 0.5 * heat


class Points:
    def __init__(self, candidates, wanted):
        self.candidates, self.wanted = candidates, wanted
        self.rng = np.random.default_rng(0)

    def sizes(self, net, candidates):
        return torch.cat([residual(net, some).detach().square() for some in candidates.split(131_072)])

    def draw(self, net):
        candidates = qmc.LatinHypercube(3, rng=self.rng).random(self.candidates)
        sizes = self.sizes(net, torch.tensor(candidates, dtype=torch.float32).to(DEVICE)).cpu().numpy()
        chances = sizes.astype(np.float64) + sizes.mean()
        rows = self.rng.choice(len(candidates), self.wanted, replace=False, p=chances / chances.sum())
        return torch.tensor(candidates[rows], dtype=torch.float32).to(DEVICE)


class PointsOnDevice(Points):
    """The same drawing: a Latin hypercube, and without replacement the smallest of exponential times."""

    def draw(self, net):
        cells = torch.stack([torch.randperm(self.candidates, device=DEVICE) for _ in range(3)], 1)
        candidates = (cells + torch.rand(cells.shape, device=DEVICE)) / self.candidates
        sizes = self.sizes(net, candidates)
        times = torch.empty_like(sizes).exponential_() / (sizes + sizes.mean())
        return candidates[times.topk(self.wanted, largest=False).indices]


def fit(net, points):
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=10, max_eval=12, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = residual(net, points).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--rounds", type=int, default=28)
    options = parser.parse_args()
    wide, deep, candidates, wanted = (16, 2, 500, 100) if options.tiny else (128, 4, 1_000_000, 65_536)
    torch.manual_seed(0)
    start = time.perf_counter()
    net = Fin(wide, deep).to(DEVICE)
    points = (PointsOnDevice if options.fixed else Points)(candidates, wanted)
    for number in range(options.rounds):
        first = fit(net, points.draw(net))
        if number % 7 == 6:
            print(f"round {number + 1}: {first.item():.3e}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
