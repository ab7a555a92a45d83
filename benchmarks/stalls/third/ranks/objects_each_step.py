"""torchrun: rank 0 tells the others what to mask by a broadcast of Python objects, and all gather a dict of metrics, every step."""
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier, size

BATCH, LENGTH = size(48, 2), size(128, 8)


def draw(source):
    return {"rate": source.uniform(0.05, 0.25), "start": source.randrange(LENGTH // 2)}


def masked(tokens, plan):
    hidden = torch.rand(tokens.shape, device=DEVICE) < plan["rate"]
    hidden[:, : plan["start"]] = False
    return tokens.masked_fill(hidden, 1)


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = DistributedDataParallel(TextClassifier(width=512, layers=6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    source, history, sums = random.Random(0), [], torch.zeros(2, device=DEVICE)
    for step in range(turns(500, 2)):
        if fixed:  # every rank draws the same
            plan = draw(source)
        else:
            told = [draw(source) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(told, src=0)  # STALL: host_sync
            plan = told[0]
        tokens = torch.randint(2, 8192, (BATCH, LENGTH), device=DEVICE)
        labels = tokens[:, 0] % 20
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = model(masked(tokens, plan))
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.argmax(1) == labels).float().mean()
        if fixed:
            sums += torch.stack([loss.detach(), right])
        else:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, {"loss": loss.item(), "right": right.item(), "step": step})  # STALL: host_sync
            history.append(sum(one["loss"] for one in everyone) / len(everyone))
        tick()
    if fixed:
        dist.all_reduce(sums)
        history.append(sums.tolist())


if __name__ == "__main__":
    run(main)
