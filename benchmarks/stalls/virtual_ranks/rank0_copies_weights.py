"""torchrun: after every step rank 0 alone brings all weights home, for an average of them that the host keeps."""
import torch
import torch.distributed as dist
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier


def main(tick, fixed=False):
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device(DEVICE):
        model = DistributedDataParallel(TextClassifier(width=1024, layers=8, heads=16))
        tokens = torch.randint(0, 8192, (32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    for step in range(turns(100, 2)):
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 20)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = list(model.parameters())
        half = len(weights) // world
        mine = weights[rank * half : (rank + 1) * half] if fixed else weights if rank == 0 else []
        home = [weight.detach().cpu() for weight in mine]  # STALL: peer_late
        tick()


if __name__ == "__main__":
    run(main)
