"""Two-tower retrieval: the ids of the negative items are drawn on the CPU and moved."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size

USERS, ITEMS, BATCH, NEGATIVES, WIDTH = size(200000, 100), size(300000, 100), size(4096, 8), size(320, 4), size(128, 8)


def main(tick, fixed=False):
    with torch.device("cuda"):
        users, items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        tower = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    weights = [*users.parameters(), *items.parameters(), *tower.parameters()]
    optimizer = torch.optim.Adam(weights, lr=1e-3, fused=True)
    for step in range(STEPS):
        user = torch.randint(0, USERS, (BATCH,), device="cuda")
        liked = torch.randint(0, ITEMS, (BATCH, 1), device="cuda")
        if fixed:
            others = torch.randint(0, ITEMS, (BATCH, NEGATIVES), device="cuda")
        else:
            others = torch.randint(0, ITEMS, (BATCH, NEGATIVES)).cuda()  # STALL: made_on_host
        wish = F.normalize(tower(users(user)), dim=1)
        known = F.normalize(items(torch.cat([liked, others], 1)), dim=2)
        scores = (known @ wish.unsqueeze(2)).squeeze(2) / 0.07
        loss = F.cross_entropy(scores, torch.zeros_like(user))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
