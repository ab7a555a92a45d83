"""torchrun: each rank steps the parameters that are its own, and broadcasts them to the others one by one."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from models import ViT


def main(tick, fixed=False):
    with torch.device(DEVICE):
        model = DistributedDataParallel(ViT(width=256, layers=12, heads=4, classes=100))
        x, y = torch.rand(16, 3, 224, 224), torch.randint(0, 100, (16,))
    shares = [list(model.parameters())[rank :: dist.get_world_size()] for rank in range(dist.get_world_size())]
    optimizer = torch.optim.AdamW(shares[dist.get_rank()], lr=1e-4, fused=DEVICE == "cuda")
    for step in range(turns(100, 2)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        for rank, share in enumerate(shares):
            if fixed:
                flat = parameters_to_vector(share).detach()
                dist.broadcast(flat, rank)
                vector_to_parameters(flat, share)
                continue
            for parameter in share:
                dist.broadcast(parameter.detach(), rank)  # STALL: exposed_collective
        tick()


if __name__ == "__main__":
    run(main)
