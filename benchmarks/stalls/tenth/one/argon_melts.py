"""A crystal of argon is warmed until it melts: a learnt potential gives the forces, and who is near whom is looked up every few moves."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from scipy.spatial import cKDTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REACH, STEP = 1.9, 0.002


class Potential(nn.Module):
    """Atoms hear from those near them, a few times; what they know at last is their energy. The repulsion is by hand."""

    def __init__(self, wide, deep, waves=24):
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.7, REACH, waves))
        self.start = nn.Parameter(torch.randn(wide))
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(waves, wide), nn.SiLU(), nn.Linear(wide, wide)) for _ in range(deep))
        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, wide)) for _ in range(deep))
        self.energy = nn.Linear(wide, 1)

    def forward(self, places, edge, pairs):
        to, other = pairs
        way = places[other] - places[to]
        way = way - edge * (way / edge).round()
        far = way.square().sum(1).clamp(min=0.25).sqrt()
        fade = 0.5 * (1 + (far * (np.pi / REACH)).cos()) * (far < REACH)
        waves = (-20 * (far[:, None] - self.centres).square()).exp() * fade[:, None]
        x = self.start.expand(len(places), -1)
        for filtering, mixing in zip(self.filters, self.mix):
            heard = torch.zeros_like(x).index_add(0, to, x[other] * filtering(waves))
            x = x + mixing(heard)
        sixth = far.pow(-6)
        return 0.01 * self.energy(x).sum() + (2 * (sixth.square() - sixth) * fade).sum()


def neighbours(places, edge, reach):
    """All pairs within reach, both ways, in a box that goes on beyond its faces."""
    tree = cKDTree(np.mod(places.cpu().numpy().astype(np.float64), edge), boxsize=edge)  # STALL: host_work, blocking_copy
    pairs = tree.query_pairs(reach, output_type="ndarray")  # STALL: host_work
    pairs = np.concatenate([pairs, pairs[:, ::-1]]).T  # STALL: host_work
    return torch.from_numpy(np.ascontiguousarray(pairs)).to(DEVICE)  # STALL: blocking_copy


def neighbours_on_device(places, edge, reach):
    found = []
    for first in range(0, len(places), 2048):
        way = places[None] - places[first : first + 2048, None]
        way -= edge * (way / edge).round()
        near = way.square_().sum(2) < reach**2
        near[torch.arange(len(near), device=DEVICE), torch.arange(first, first + len(near), device=DEVICE)] = False
        pairs = near.nonzero().T
        pairs[0] += first
        found.append(pairs)
    return torch.cat(found, 1)


class Box:
    """A cubic crystal, its atoms moved by the velocity Verlet rule and warmed a little at every move."""

    def __init__(self, side, potential):
        line = torch.arange(side, device=DEVICE, dtype=torch.float32) * 1.1
        self.edge, self.potential = side * 1.1, potential
        self.places = torch.cartesian_prod(line, line, line)
        self.speeds = 0.5 * torch.randn(self.places.shape, device=DEVICE)
        self.pull = torch.zeros_like(self.places)

    def forces(self, pairs):
        places = self.places.detach().requires_grad_()
        energy = self.potential(places, self.edge, pairs)
        (slope,) = torch.autograd.grad(energy, places)
        return -slope, energy.detach()

    def move(self, pairs):
        self.speeds = self.speeds + 0.5 * STEP * self.pull
        self.places = self.places + STEP * self.speeds
        self.pull, energy = self.forces(pairs)
        self.speeds = 1.0005 * (self.speeds + 0.5 * STEP * self.pull)
        return energy + 0.5 * self.speeds.square().sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--moves", type=int, default=700)
    options = parser.parse_args()
    side, wide, deep, moves = (5, 16, 1, 12) if options.tiny else (22, 224, 4, options.moves)
    torch.manual_seed(0)
    start = time.perf_counter()
    box = Box(side, Potential(wide, deep).to(DEVICE).requires_grad_(False))
    look = neighbours_on_device if options.fixed else neighbours
    energies = []
    for move in range(moves):
        if move % 5 == 0:
            pairs = look(box.places, box.edge, REACH + 0.1)
        energies.append(box.move(pairs))
    print(f"{pairs.shape[1]} pairs at last, energy of an atom {torch.stack(energies)[-10:].mean().item() / side**3:.3f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
