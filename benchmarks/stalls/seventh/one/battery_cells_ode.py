"""Ageing of battery cells as a neural ODE: charge, two overvoltages and warmth follow the current that a vehicle's log tells, each log with clock times of its own."""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from torchdiffeq import odeint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drives(cells, entries, seconds):
    """Of each cell: when the log has an entry, and the current then."""
    rng = np.random.default_rng(7)
    times = np.sort(rng.uniform(0, seconds, (cells, entries)), 1)
    times[:, 0], times[:, -1] = 0, seconds
    phase, slow = rng.uniform(0, 6.28, (2, cells, 1))
    currents = np.sin(times / 25 + phase) + 0.5 * np.sin(times / 60 + slow) + 0.02 * rng.standard_normal(times.shape)
    return times, currents


class LoggedCurrent:
    def __init__(self, times, currents):
        self.times, self.currents = times, currents

    def __call__(self, t):
        now = t.item()
        values = [np.interp(now, times, currents) for times, currents in zip(self.times, self.currents)]
        return torch.tensor(np.array(values), dtype=torch.float32, device=DEVICE)[:, None]


class LoggedCurrentOnDevice:
    def __init__(self, times, currents):
        self.times = torch.tensor(times, dtype=torch.float32, device=DEVICE)
        self.currents = torch.tensor(currents, dtype=torch.float32, device=DEVICE)

    def __call__(self, t):
        now = t.float().expand(len(self.times), 1).contiguous()
        after = torch.searchsorted(self.times, now).clamp(1, self.times.shape[1] - 1)
        early, late = self.times.gather(1, after - 1), self.times.gather(1, after)
        return torch.lerp(self.currents.gather(1, after - 1), self.currents.gather(1, after), (now - early) / (late - early).clamp(min=1e-6))


class Cells(nn.Module):
    """An equivalent circuit, and a net for what it does not know."""

    def __init__(self, current, wide):
        super().__init__()
        self.current, self.asked = current, 0
        self.rates = nn.Parameter(torch.tensor([1 / 900, 1 / 30, 1 / 120, 1 / 200]))
        self.net = nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 4))

    def forward(self, t, state):
        self.asked += 1
        current = self.current(t)
        driven = torch.cat([-current, current - state[:, 1:3], current.square() - state[:, 3:]], 1)
        return self.rates * (driven + 0.1 * self.net(torch.cat([state, current], 1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=42)
    options = parser.parse_args()
    cells, entries, seconds, wide = (8, 30, 40.0, 16) if options.tiny else (1024, 400, 600.0, 256)
    torch.manual_seed(0)
    start = time.perf_counter()
    times, currents = drives(cells, entries, seconds)
    model = Cells((LoggedCurrentOnDevice if options.fixed else LoggedCurrent)(times, currents), wide).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock = torch.linspace(0, seconds, 31, device=DEVICE)
    first = torch.tensor([0.8, 0.0, 0.0, 0.1], device=DEVICE).repeat(cells, 1)
    measured = 3.2 + 0.6 * torch.rand(len(clock), cells, device=DEVICE)
    for turn in range(options.turns):
        states = odeint(model, first, clock, rtol=1e-3, atol=1e-4, method="dopri5")
        voltage = 3.0 + 0.9 * states[..., 0] - 0.05 * states[..., 1] - 0.03 * states[..., 2]
        loss = (voltage - measured).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if turn % 10 == 9:
            print(f"{turn + 1}: loss {loss.item():.5f}, {model.asked} times asked")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
