"""torchrun: rank 0 writes `last.pt` after every step, and all others meet it late in the next all-reduce."""
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, resnet, run, size


def main(tick, fixed=False):
    model = DistributedDataParallel(resnet(width=48, blocks=2), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    x = torch.randn(size(128, 2), 3, size(160, 32), size(160, 32), device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, x.shape[:1], device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        for step in range(STEPS):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and (not fixed or step == STEPS - 1):
                torch.save(model.module.state_dict(), f"{folder}/last.pt")  # STALL: peer_late
            tick()


if __name__ == "__main__":
    run(main)
