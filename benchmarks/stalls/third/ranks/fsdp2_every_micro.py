"""torchrun: FSDP2 under accumulation reduces the gradients and gathers the parameters anew in each of eight micro-batches."""
import torch
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from models import TextClassifier, size

MICRO, BATCH, LENGTH = size(8, 2), size(4, 2), size(256, 8)


def main(tick, fixed=False):
    torch.manual_seed(0)
    model = TextClassifier(width=2048, layers=size(10, 2), heads=16).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
    for layer in model.body.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not fixed)
    fully_shard(model, mesh=mesh, reshard_after_forward=not fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(turns(40, 2)):
        for micro in range(MICRO):
            if fixed:
                last = micro == MICRO - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            tokens = torch.randint(0, 8192, (BATCH, LENGTH), device=DEVICE)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(tokens), tokens[:, 0] % 20) / MICRO
            loss.backward()  # STALL: exposed_collective
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
