"""A walker's muscles learn without gradients: each rank tries its own changes of the weights, and all are added up by how far they walked."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import DEVICE, run

SENSES, MUSCLES = 64, 16


class World:
    """Many walkers at once, each with its own net: nets [walkers, weights]."""

    def __init__(self, wide):
        chance = torch.Generator(DEVICE).manual_seed(1)
        self.sizes = [(SENSES, wide), (wide, wide), (wide, MUSCLES)]
        self.body = torch.linalg.qr(torch.randn(SENSES, SENSES, device=DEVICE, generator=chance))[0]
        self.pull = 0.3 * torch.randn(MUSCLES, SENSES, device=DEVICE, generator=chance)
        self.weights = sum(a * b for a, b in self.sizes)

    def walked(self, nets, starts, times):
        parts = [part.view(-1, *size) for part, size in zip(nets.split([a * b for a, b in self.sizes], 1), self.sizes)]
        states, far = starts.expand(len(nets), -1, -1), 0
        for _ in range(times):
            x = states
            for part in parts:
                x = torch.bmm(x, part).mul_(part.shape[1] ** -0.5).tanh_()
            states = (states @ self.body + x @ self.pull).tanh()
            far = far + states[..., 0].mean(1) - 0.01 * x.square().mean((1, 2))
        return far


def changes(seed, count, weights):
    chance = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(count, weights, device=DEVICE, generator=chance)


def all_changes(mine, seeds):
    gathered = [torch.empty_like(mine) for _ in seeds]
    dist.all_gather(gathered, mine)
    return gathered


def all_changes_again(mine, seeds):
    """Only numbers travel between the ranks: from a seed the same changes come out everywhere."""
    return [mine if rank == dist.get_rank() else changes(seed, *mine.shape) for rank, seed in enumerate(seeds)]


def generation(world, middle, number, args):
    """One turn of the evolution; returns how far the walkers came on average."""
    seeds = [1000 * number + rank for rank in range(dist.get_world_size())]
    mine = changes(seeds[dist.get_rank()], args.walkers, world.weights)
    starts = torch.randn(args.starts, SENSES, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(number))
    far = world.walked(middle + 0.1 * mine, starts, args.times)
    scores = torch.empty(dist.get_world_size() * args.walkers, device=DEVICE)
    dist.all_gather_into_tensor(scores, far)
    worth = scores.argsort().argsort().float() / (len(scores) - 1) - 0.5
    for part, weight in zip((all_changes_again if args.fixed else all_changes)(mine, seeds), worth.split(args.walkers)):
        middle += args.rate / 100 / len(scores) * (weight @ part)
    return scores.mean()


def main(args):
    world = World(args.width)
    middle, first, last = torch.zeros(world.weights, device=DEVICE), None, None
    for number in range(args.generations):
        last = generation(world, middle, number, args)
        first = last if first is None else first
    if dist.get_rank() == 0:
        print(f"walked {first.item():.4f} at first, {last.item():.4f} at last")


if __name__ == "__main__":
    run(main, generations=700, walkers=48, starts=32, times=8, width=2048, rate=30)
