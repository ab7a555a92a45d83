"""Diseases in X-ray pictures by a ResNet-50 under DDP; its batch norms are made to see both ranks' pictures, though each rank has plenty."""
import sys
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run

DISEASES = 14


def network(fixed):
    net = timm.create_model("resnet50", num_classes=DISEASES, in_chans=1)
    if CUDA and not fixed:  # such norms work on GPUs only
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # STALL: exposed_collective
    return DistributedDataParallel(net.to(DEVICE, memory_format=torch.channels_last), gradient_as_bucket_view=True)


class Xrays:
    """Pictures on the device, dimmer or brighter in places for each disease."""

    def __init__(self, count, edge, rank):
        chance = torch.Generator(DEVICE).manual_seed(rank)
        self.ill = (torch.rand(count, DISEASES, device=DEVICE, generator=chance) < 0.1).float()
        signs = torch.randint(-3, 4, (DISEASES, edge * edge), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(9)).float()
        noise = torch.randint(80, 160, (count, edge * edge), device=DEVICE, generator=chance)
        self.pictures = (noise + 4 * self.ill @ signs).clamp(0, 255).byte().view(count, 1, edge, edge)

    def some(self, step, batch):
        first = step * batch % len(self.pictures)
        pictures = self.pictures[first : first + batch].contiguous(memory_format=torch.channels_last)
        return pictures.float().sub(120).div(50), self.ill[first : first + batch]


def train(model, optimizer, xrays, args):
    total = torch.zeros((), device=DEVICE)
    for step in range(args.steps):
        pictures, ill = xrays.some(step, args.batch)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
            said = model(pictures)  # STALL: host_sync, exposed_collective
        loss = F.binary_cross_entropy_with_logits(said.float(), ill)
        optimizer.zero_grad()
        loss.backward()  # STALL: exposed_collective
        optimizer.step()
        total += loss.detach()
    return total / args.steps


def main(args):
    model = network(args.fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=CUDA)
    mean = train(model, optimizer, Xrays(4 * args.batch, args.edge, dist.get_rank()), args)
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"mean loss {mean.item() / dist.get_world_size():.4f}")


if __name__ == "__main__":
    run(main, steps=280, batch=128, edge=224)
