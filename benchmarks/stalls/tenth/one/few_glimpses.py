"""Learning to learn (MAML): a net is sought that tells five kinds of insects apart after a few steps on a few glimpses of each."""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = 5


def adapted(net, weights, glimpses, kinds, steps, rate):
    """The weights after some steps on one task; what it took to get there can be differentiated."""

    def loss_of(weights):
        return F.cross_entropy(functional_call(net, weights, (glimpses,)), kinds)

    for _ in range(steps):
        slopes = grad(loss_of)(weights)
        weights = {name: weight - rate * slopes[name] for name, weight in weights.items()}
    return weights


def adapted_by_hand(net, weights, glimpses, kinds, steps, rate):
    for _ in range(steps):
        loss = F.cross_entropy(functional_call(net, weights, (glimpses,)), kinds)  # STALL: launch_bound
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)  # STALL: launch_bound
        weights = {name: weight - rate * slope for (name, weight), slope in zip(weights.items(), slopes)}  # STALL: launch_bound
    return weights


def loss_one_by_one(net, weights, tasks, steps, rate):
    """As papers tell it: for each task in the batch, adapt, then ask."""
    losses = []
    for seen, kinds, asked, right in zip(*tasks):
        own = adapted_by_hand(net, weights, seen, kinds, steps, rate)  # STALL: launch_bound
        losses.append(F.cross_entropy(functional_call(net, own, (asked,)), right))
    return torch.stack(losses).mean()


def loss_at_once(net, weights, tasks, steps, rate):
    def task(seen, kinds, asked, right):
        own = adapted(net, weights, seen, kinds, steps, rate)
        return F.cross_entropy(functional_call(net, own, (asked,)), right)

    return vmap(task)(*tasks).mean()


def insects(batch, shots, queries, features, chance):
    """Tasks: each has five kinds of its own, a glimpse is a kind's features with noise."""
    kinds = torch.arange(KINDS, device=DEVICE)
    middles = torch.randn(batch, KINDS, features, device=DEVICE, generator=chance)

    def glimpses(each):
        right = kinds.repeat(each).expand(batch, -1)
        clear = middles.gather(1, right[:, :, None].expand(-1, -1, features))
        return clear + 1.5 * torch.randn(clear.shape, device=DEVICE, generator=chance), right

    return (*glimpses(shots), *glimpses(queries))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--rounds", type=int, default=160)
    options = parser.parse_args()
    batch, features, wide, queries, rounds = (3, 16, 16, 3, 5) if options.tiny else (10, 512, 1024, 40, options.rounds)
    torch.manual_seed(0)
    start = time.perf_counter()
    net = nn.Sequential(nn.Linear(features, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, KINDS)).to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    meta = loss_at_once if options.fixed else loss_one_by_one
    chance, total = torch.Generator(DEVICE).manual_seed(1), torch.zeros((), device=DEVICE)
    for _ in range(rounds):
        tasks = insects(batch, 5, queries, features, chance)
        loss = meta(net, dict(net.named_parameters()), tasks, 5, 0.05)
        optimizer.zero_grad()
        loss.backward()  # STALL: launch_bound
        optimizer.step()
        total += loss.detach()
    print(f"mean loss {total.item() / rounds:.4f}, the last {loss.item():.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
