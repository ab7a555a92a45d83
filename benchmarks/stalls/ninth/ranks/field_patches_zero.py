"""What grows on a field, by a deep and narrow vision transformer; AdamW's state is shared out over the ranks, as it was for a larger model."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run

CROPS = 20


def optimizer_for(model, fixed):
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    if fixed:
        return torch.optim.AdamW(groups, lr=5e-4, fused=CUDA)
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=5e-4, fused=CUDA)


def fields(count, edge, rank):
    chance = torch.Generator(DEVICE).manual_seed(rank)
    crops = torch.randint(0, CROPS, (count,), device=DEVICE, generator=chance)
    line = torch.linspace(0, 6.28, edge, device=DEVICE)
    rows = (line[:, None] * (crops[:, None, None] + 1)).sin() if count else None
    return (rows[:, None] + torch.randn(count, 3, edge, edge, device=DEVICE, generator=chance)), crops


class Training:
    def __init__(self, args):
        net = VisionTransformer(args.edge, 16, num_classes=CROPS, embed_dim=args.width, depth=args.layers, num_heads=args.width // 64 or 1)
        self.model = DistributedDataParallel(net.to(DEVICE), gradient_as_bucket_view=True)
        self.optimizer = optimizer_for(self.model, args.fixed)
        self.total = torch.zeros((), device=DEVICE)

    def step(self, pictures, crops):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
            said = self.model(pictures)
        loss = F.cross_entropy(said.float(), crops)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.total += loss.detach()


def main(args):
    training = Training(args)
    pictures, crops = fields(args.batch * 4, args.edge, dist.get_rank())
    for step in range(args.steps):
        some = slice(step % 4 * args.batch, (step % 4 + 1) * args.batch)
        training.step(pictures[some], crops[some])
    dist.all_reduce(training.total)
    if dist.get_rank() == 0:
        print(f"mean loss {training.total.item() / args.steps / dist.get_world_size():.4f}")


if __name__ == "__main__":
    run(main, steps=170, batch=48, edge=224, width=384, layers=36)
