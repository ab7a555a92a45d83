"""A ViT under DDP with `find_unused_parameters=True`, left over from a model that needed it, and labels from a Python list."""
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import VisionTransformer

KINDS = 100


def labels_on_device(labels, at_leisure):
    """The labels of a batch. The plain way waits for the device; it has half a hundred milliseconds of work ahead and behind."""
    if at_leisure and CUDA:
        return torch.tensor(labels).pin_memory().to(DEVICE, non_blocking=True)
    return torch.tensor(labels, device=DEVICE)


def main(args):
    chance = random.Random(dist.get_rank())
    with DEVICE:
        net = VisionTransformer(args.edge, 16, args.layers, args.width // 64, args.width, 4 * args.width, num_classes=KINDS)
    model = DistributedDataParallel(net, find_unused_parameters=not args.fixed, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=CUDA)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    pool = torch.randint(0, 256, (4, args.batch, 3, args.edge, args.edge), dtype=torch.uint8, device=DEVICE, generator=generator)
    running = torch.zeros((), device=DEVICE)
    for step in range(args.steps):
        labels = labels_on_device([chance.randrange(KINDS) for _ in range(args.batch)], args.fixed)
        images = (pool[step % 4].float() - 127.5) / 60
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running.lerp_(loss.detach(), 0.1)
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: running loss {running.item():.4f}")
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main, steps=150, batch=192, edge=224, width=768, layers=12)
