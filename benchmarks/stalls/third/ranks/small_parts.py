"""torchrun: FSDP2 with every linear layer and every norm as a part of its own."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from models import TextClassifier, size

BATCH, LENGTH = size(32, 2), size(256, 8)


def main(tick, fixed=False):
    torch.manual_seed(0)
    model = TextClassifier(width=768, layers=size(16, 2), heads=12).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
    for layer in model.body.layers:
        if not fixed:
            for part in (layer.self_attn, layer.linear1, layer.linear2, layer.norm1, layer.norm2):
                fully_shard(part, mesh=mesh)  # STALL: exposed_collective
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(turns(120, 2)):
        tokens = torch.randint(0, 8192, (BATCH, LENGTH), device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens), tokens[:, 0] % 20)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
