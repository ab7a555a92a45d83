"""torchrun: DDP with enough to compute for its all-reduce to hide behind, and a loss that is read every 50 steps."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import ViT, size

BATCH, EDGE = size(192, 2), size(224, 32)


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = DistributedDataParallel(ViT(width=768, layers=8, heads=12, classes=100), gradient_as_bucket_view=True)
        x, y = torch.rand(BATCH, 3, EDGE, EDGE), torch.randint(0, 100, (BATCH,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    history = []
    for step in range(turns(250, 2)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            history.append(shared.item() / dist.get_world_size())
        tick()


if __name__ == "__main__":
    run(main)
