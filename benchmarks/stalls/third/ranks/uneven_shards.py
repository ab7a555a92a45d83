"""torchrun: the corpus is sorted by length and cut into one piece a rank, so the last rank pads to much longer batches."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier, size

BATCH, LONGEST = size(32, 2), size(512, 16)


def corpus(count):
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(count, generator=generator) ** 3 * (LONGEST - 8) + 8).int()
    return [torch.randint(1, 8192, (length,), generator=generator) for length in sorted(lengths.tolist())]


def batches(texts, rank, world, steps, dealt):
    mine = texts[rank::world] if dealt else texts[rank * len(texts) // world : (rank + 1) * len(texts) // world]  # STALL: peer_late
    order = torch.randperm(len(mine) // BATCH, generator=torch.Generator().manual_seed(1)).tolist()
    for step in range(steps):
        start = order[step % len(order)] * BATCH
        padded = torch.nn.utils.rnn.pad_sequence(mine[start : start + BATCH], batch_first=True)
        yield (padded.pin_memory() if DEVICE == "cuda" else padded).to(DEVICE, non_blocking=True)


def main(tick, fixed=False):
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device(DEVICE):
        model = DistributedDataParallel(TextClassifier(width=1024, layers=8, heads=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    for tokens in batches(corpus(size(6400, 32)), rank, world, turns(500, 2), fixed):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens), tokens[:, 0] % 20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
