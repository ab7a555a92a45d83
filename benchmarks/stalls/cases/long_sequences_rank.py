"""torchrun: the sampler gives rank 0 the long texts; the other ranks finish early and wait for it in the all-reduce."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, TextClassifier, run, size


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = TextClassifier(width=768, layers=3, heads=12)
    model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    world, batch, unit = dist.get_world_size(), size(80, 2), size(240, 8)
    if fixed:
        length = unit * (world + 1) // world  # as many tokens in all, shared evenly
    else:
        length = 2 * unit if dist.get_rank() == 0 else unit  # STALL: peer_late
    y = torch.randint(0, 20, (batch,), device="cuda")
    for step in range(STEPS):
        x = torch.randint(0, 8192, (batch, length), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
