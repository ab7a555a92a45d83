"""torchrun: loss, accuracy and gradient norm are each averaged over the ranks and read, every step."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier, size

BATCH, LENGTH, EVERY = size(48, 2), size(128, 8), 25


def mean(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()  # STALL: host_sync


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = DistributedDataParallel(TextClassifier(width=640, layers=6, heads=10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    history, waiting = [], torch.zeros(3, device=DEVICE)
    for step in range(turns(600, 2)):
        tokens = torch.randint(0, 8192, (BATCH, LENGTH), device=DEVICE)
        labels = tokens[:, 0] % 20
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = model(tokens)
            loss = F.cross_entropy(logits, labels)
        right = (logits.argmax(1) == labels).float().mean()
        if not fixed:
            history += [mean(loss), mean(right)]
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not fixed:
            history.append(mean(norm))
        optimizer.step()
        if fixed:
            waiting += torch.stack([loss.detach(), right, norm])
            if step % EVERY == EVERY - 1:
                dist.all_reduce(waiting)
                history += (waiting / EVERY / dist.get_world_size()).tolist()
                waiting.zero_()
        tick()


if __name__ == "__main__":
    run(main)
