"""Which insurance claims are false: a Bayesian logistic regression, sampled by Hamiltonian Monte Carlo, whose step adapts to how often it is accepted."""
import argparse
import math
import time

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Posterior:
    def __init__(self, claims, facts):
        self.x = torch.randn(claims, facts, device=DEVICE)
        truth = torch.randn(facts, device=DEVICE) / math.sqrt(facts)
        self.y = torch.bernoulli(torch.sigmoid(self.x @ truth - 1))

    def __call__(self, weights):
        """The log density and its slope."""
        scores = self.x @ weights
        density = -F.binary_cross_entropy_with_logits(scores, self.y, reduction="sum") - 0.5 * weights.square().sum()
        return density, self.x.mT @ (self.y - torch.sigmoid(scores)) - weights


def travel(posterior, place, push, slope, length, steps):
    for _ in range(steps):
        push = push + 0.5 * length * slope
        place = place + length * push
        density, slope = posterior(place)
        push = push + 0.5 * length * slope
    return place, push, density, slope


def sample_reading(posterior, facts, turns, steps, first):
    """Accepting is decided on the host, and so is the next length of a step."""
    place, length, accepted = torch.zeros(facts, device=DEVICE), first, 0
    density, slope = posterior(place)
    energy, means = density.item(), torch.zeros(facts, device=DEVICE)
    for turn in range(turns):
        push = torch.randn(facts, device=DEVICE)
        before = energy - 0.5 * push.square().sum().item()
        new, push, density, new_slope = travel(posterior, place, push, slope, length, steps)
        after = (density - 0.5 * push.square().sum()).item()
        chance = math.exp(min(0.0, after - before)) if math.isfinite(after) else 0.0
        if torch.rand(()).item() < chance:
            place, slope, energy = new, new_slope, density.item()
            accepted += 1
        length *= math.exp((chance - 0.8) / math.sqrt(turn + 10))
        means += place / turns
    return means, accepted / turns, length


def sample(posterior, facts, turns, steps, first):
    """All of it is decided on the device."""
    place, length = torch.zeros(facts, device=DEVICE), torch.full((), first, device=DEVICE)
    accepted, means = torch.zeros((), device=DEVICE), torch.zeros(facts, device=DEVICE)
    density, slope = posterior(place)
    for turn in range(turns):
        push = torch.randn(facts, device=DEVICE)
        before = density - 0.5 * push.square().sum()
        new, push, new_density, new_slope = travel(posterior, place, push, slope, length, steps)
        chance = torch.exp((new_density - 0.5 * push.square().sum() - before).clamp(max=0)).nan_to_num(0.0)
        taken = torch.rand((), device=DEVICE) < chance
        place, slope, density = torch.where(taken, new, place), torch.where(taken, new_slope, slope), torch.where(taken, new_density, density)
        accepted += taken
        length = length * torch.exp((chance - 0.8) / math.sqrt(turn + 10))
        means += place / turns
    return means, accepted.item() / turns, length.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=420)
    options = parser.parse_args()
    claims, facts, steps = (500, 8, 4) if options.tiny else (1_500_000, 512, 16)
    torch.manual_seed(0)
    start = time.perf_counter()
    posterior = Posterior(claims, facts)
    draw = sample if options.fixed else sample_reading
    means, accepted, length = draw(posterior, facts, options.turns, steps, 0.3 / math.sqrt(claims))
    print(f"mean weight {means.abs().mean().item():.4f}, accepted {accepted:.2f}, step {length:.2e}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
