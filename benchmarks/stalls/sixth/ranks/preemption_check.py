"""Span prediction under DDP on a cluster that may want its nodes back: on SIGTERM, or near the end of the allotted time,
all ranks leave together."""
import signal
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.nn.parallel import DistributedDataParallel

VOCAB, HIDDEN_WORD, IGNORED = 16384, 3, -100


class SpanPredictor(nn.Module):
    def __init__(self, width, layers, length):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        return self.head(self.body(self.words(tokens) + self.places))


def hide_spans(row, starts, rng):
    """Hides whole words, a few in a row, until 30% of the row are hidden."""
    shown, wanted = row.copy(), np.full_like(row, IGNORED)
    left = int(0.3 * len(row))
    while left > 0:
        first = int(rng.integers(0, len(starts) - 8))
        many = min(int(rng.geometric(0.2)), 8)
        begin, end = starts[first], min(starts[first + many], starts[first] + left)
        wanted[begin:end] = row[begin:end]
        for place in range(begin, end):
            fate = rng.random()
            if fate < 0.8:
                shown[place] = HIDDEN_WORD
            elif fate < 0.9:
                shown[place] = rng.integers(4, VOCAB)
        left -= max(1, end - begin)
    return shown, wanted


def batches(args, rng):
    corpus = rng.integers(4, VOCAB, 1_000_000)
    while True:
        rows = torch.empty(2, args.batch, args.length, dtype=torch.int64, pin_memory=CUDA)
        for number in range(args.batch):
            place = int(rng.integers(0, len(corpus) - args.length))
            row = corpus[place : place + args.length]
            starts = np.flatnonzero(row % 4 != 0)  # other tokens go on with the word before them
            shown, wanted = hide_spans(row, starts.tolist(), rng)
            rows[0, number], rows[1, number] = torch.from_numpy(shown), torch.from_numpy(wanted)
        yield rows.to(DEVICE, non_blocking=True)


class Leaving:
    """Whether this job has to go: it was told to, or its time is up. All ranks find the same."""

    def __init__(self, minutes, every):
        self.told, self.end, self.every = False, time.monotonic() + 60 * minutes, every
        signal.signal(signal.SIGTERM, self.tell)

    def tell(self, _number, _frame):
        self.told = True

    def agreed(self, step):
        if step % self.every:
            return False
        wish = torch.tensor([self.told or time.monotonic() > self.end], dtype=torch.int32, device=DEVICE)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        return wish.item() > 0


def main(args):
    model = DistributedDataParallel(SpanPredictor(args.width, args.layers, args.length).to(DEVICE), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    leaving = Leaving(minutes=230, every=25 if args.fixed else 1)
    for step, (shown, wanted) in enumerate(batches(args, np.random.default_rng(dist.get_rank())), 1):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(shown).flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if leaving.agreed(step) or step == args.steps:
            break
    if dist.get_rank() == 0:
        print(f"left after step {step}, loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main, steps=150, batch=64, length=512, width=768, layers=8)
