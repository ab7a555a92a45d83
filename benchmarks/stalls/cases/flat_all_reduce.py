"""torchrun: all gradients of a large model are joined into one tensor and averaged after the backward pass, not during it."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, TextClassifier, run, size


def average(grads):
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)  # STALL: exposed_collective
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = TextClassifier(width=2048, layers=6, heads=16)
    if fixed:
        model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    y = torch.randint(0, 20, (size(24, 2),), device="cuda")
    for step in range(STEPS):
        x = torch.randint(0, 8192, (size(24, 2), size(256, 8)), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if not fixed:
            average([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
