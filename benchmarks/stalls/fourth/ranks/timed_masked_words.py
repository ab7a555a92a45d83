"""torchrun: spans of words are masked and guessed; loss and accuracy of all ranks are printed of each step, and each step is timed."""
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, synchronize, turns
from torch.nn.parallel import DistributedDataParallel

from models import encoder, size

BATCH, LENGTH, VOCAB, MASK = size(64, 2), size(256, 16), size(8192, 64), 1


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = encoder(768, layers=12, heads=12)
        width = self.body.layers[0].linear1.in_features
        self.embed, self.places, self.head = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width), nn.Linear(width, VOCAB)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens) + self.places.weight))


def masked(rng, tokens):
    """15% of the words in spans, as in SpanBERT; the batch and what is to be guessed, in pinned memory."""
    x, goal = tokens.copy(), np.full_like(tokens, -100)
    for words, row, wanted in zip(tokens, x, goal):
        left = int(0.15 * LENGTH)
        while left > 0:
            span = min(int(rng.geometric(0.3)), 10, left)
            start = int(rng.integers(0, LENGTH - span))
            wanted[start : start + span] = words[start : start + span]
            row[start : start + span] = MASK
            left -= span
    pair = torch.from_numpy(np.stack([x, goal]))
    return (pair.pin_memory() if DEVICE == "cuda" else pair).to(DEVICE, non_blocking=True)


def main(tick, fixed=False):
    """`fixed` may also be "reads" or "timing", to mend one of the two alone."""
    unread, timed = fixed in (True, "reads"), 50 if fixed in (True, "timing") else 1
    torch.manual_seed(0)
    rank, rng = dist.get_rank(), np.random.default_rng(dist.get_rank())
    with torch.device(DEVICE):
        model = Words()
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    text = rng.integers(2, VOCAB, (16, BATCH, LENGTH))
    out = sys.stderr if rank == 0 else Path(os.devnull).open("w")  # noqa: SIM115
    start, summed = time.perf_counter(), torch.zeros(2, device=DEVICE)
    for step in range(turns(220, 2)):
        x, goal = masked(rng, text[step % 16])
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            scores = model(x)
            loss = F.cross_entropy(scores.flatten(0, 1), goal.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            asked = goal != -100
            figures = torch.stack([loss.detach(), ((scores.argmax(-1) == goal) & asked).sum() / asked.sum()])
        if unread:
            summed += figures
            if step % 50 == 49:
                dist.all_reduce(summed)
                print(step, (summed / 50 / dist.get_world_size()).tolist(), file=out)
                summed.zero_()
        else:
            dist.all_reduce(figures)
            loss_now, accuracy = (figures / dist.get_world_size()).tolist()  # STALL: host_sync
            print(f"{step} loss {loss_now:.4f} accuracy {accuracy:.2%}", file=out)
        if step % timed == timed - 1:
            synchronize()  # STALL: host_sync
            dist.barrier()  # STALL: host_sync
            print(f"{timed * BATCH * LENGTH / (time.perf_counter() - start):.0f} words/s", file=out)
            start = time.perf_counter()
        tick()


if __name__ == "__main__":
    run(main)
