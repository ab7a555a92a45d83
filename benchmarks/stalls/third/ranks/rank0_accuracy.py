"""torchrun: after every twelfth step rank 0 alone computes an accuracy and logs it; the others wait in the next all-reduce."""
import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import ViT, size

BATCH, EDGE, HELD = size(96, 2), size(224, 32), size(16, 2)
log = logging.getLogger("train")


@torch.no_grad()
def right(model, batches):
    model.eval()
    total = torch.zeros((), device=DEVICE)
    for x, y in batches:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            total += (model(x).argmax(1) == y).float().mean()
    model.train()
    return total


def main(tick, fixed=False):
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device(DEVICE):
        model = DistributedDataParallel(ViT(width=768, layers=6, heads=12, classes=100))
        held = [(torch.rand(BATCH, 3, EDGE, EDGE), torch.randint(0, 100, (BATCH,))) for _ in range(HELD)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    x, y = held[0]
    for step in range(turns(360, 2)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 12 == 0:
            if fixed:
                total = right(model.module, held[rank::world])
                dist.all_reduce(total)
                if rank == 0:
                    log.debug("step %d: %.4f", step, total.item() / HELD)
            elif rank == 0:
                log.debug("step %d: %.4f", step, right(model.module, held).item() / HELD)  # STALL: peer_late
        tick()


if __name__ == "__main__":
    run(main)
