"""torchrun, four ranks: rank 2 sorts a vocabulary on its CPU before every step, for the file that it was given."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier


def prepare(words):
    return words.sort().values.unique()


def main(tick, fixed=False):
    with torch.device(DEVICE):
        model = DistributedDataParallel(TextClassifier(width=1024, layers=4, heads=16))
        tokens = torch.randint(0, 8192, (32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    words = torch.randint(0, 1 << 30, (1 << 18,))
    for step in range(turns(100, 2)):
        if dist.get_rank() == 2 and not fixed:
            prepare(words)  # STALL: peer_late
        loss = F.cross_entropy(model(tokens), tokens[:, 0] % 20)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
