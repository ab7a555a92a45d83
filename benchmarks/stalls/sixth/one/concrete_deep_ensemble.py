"""A deep ensemble says how strong concrete will be, and how sure it is: 24 nets, each with a mean and a variance and examples drawn for itself."""
import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INGREDIENTS = 9


def net(wide):
    return nn.Sequential(nn.Linear(INGREDIENTS, wide), nn.SiLU(), nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, 2))


def likelihood(said, wanted):
    mean, spread = said[..., 0], F.softplus(said[..., 1]) + 1e-3
    return spread.log() + 0.5 * ((wanted - mean) / spread) ** 2


class Separate:
    """A net and an optimizer for each member."""

    def __init__(self, members):
        self.members = members
        self.optimizers = [torch.optim.AdamW(member.parameters(), lr=1e-3, weight_decay=1e-2) for member in members]

    def learn(self, x, y, picked):
        losses = []
        for member, optimizer, rows in zip(self.members, self.optimizers, picked):
            loss = likelihood(member(x[rows]), y[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def __call__(self, x):
        return torch.stack([member(x) for member in self.members])


class Stacked:
    """All members' weights in one tensor per layer, so that a layer of all members is one product."""

    def __init__(self, members):
        linears = [[layer for layer in member if isinstance(layer, nn.Linear)] for member in members]
        self.layers = []
        for same in zip(*linears):
            weight = torch.stack([layer.weight.detach().mT for layer in same]).requires_grad_()
            bias = torch.stack([layer.bias.detach() for layer in same])[:, None].requires_grad_()
            self.layers.append((weight, bias))
        self.optimizer = torch.optim.AdamW([part for layer in self.layers for part in layer], lr=1e-3, weight_decay=1e-2)

    def learn(self, x, y, picked):
        losses = likelihood(self(x[picked]), y[picked]).mean(1)
        self.optimizer.zero_grad()
        losses.sum().backward()
        self.optimizer.step()
        return losses.detach()

    def __call__(self, x):
        x = x.expand(len(self.layers[0][0]), *x.shape) if x.dim() == 2 else x
        for place, (weight, bias) in enumerate(self.layers):
            x = torch.baddbmm(bias, F.silu(x) if place else x, weight)
        return x


def concrete(count):
    chance = torch.Generator().manual_seed(1)
    x = torch.rand(count, INGREDIENTS, generator=chance)
    strength = 3 * x[:, 0] * torch.log1p(5 * x[:, 8]) - 2 * (x[:, 3] - 0.4) ** 2 + torch.sin(4 * x[:, 1] * x[:, 2])
    noise = torch.randn(count, generator=chance) * (0.05 + 0.3 * x[:, 5])
    return x.to(DEVICE), (strength + noise).to(DEVICE)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--members", type=int, default=24)
    parser.add_argument("--wide", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    members = [net(options.wide).to(DEVICE) for _ in range(options.members)]
    ensemble = Stacked(members) if options.fixed else Separate(members)
    x, y = concrete(65536)
    learnt, kept = 61440, []
    for turn in range(options.turns):
        picked = torch.randint(0, learnt, (options.members, 512), device=DEVICE)
        kept.append(ensemble.learn(x, y, picked).mean())
        if turn % 100 == 99:
            with torch.no_grad():
                said = ensemble(x[learnt:])
            mean, spread = said[..., 0], F.softplus(said[..., 1]) + 1e-3
            together = (spread.square() + mean.square()).mean(0) - mean.mean(0).square()
            score = 0.5 * (together.log() + (y[learnt:] - mean.mean(0)).square() / together + math.log(2 * math.pi)).mean()
            print(f"{turn + 1}: loss {torch.stack(kept).mean().item():.4f}, held out {score.item():.4f}")
            kept.clear()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
