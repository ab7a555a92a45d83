"""Train on several GPUs with DistributedDataParallel. The first of them also validates, after every step."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

device = "cuda"
width, layers, batch = 2048, 8, 16384


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(self.norm(x))))


def loss_of(model, rows):
    """How well the model fills in what is missing of the rows."""
    with torch.autocast(device, dtype=torch.bfloat16):
        return F.mse_loss(model(F.dropout(rows, 0.2)), rows)


dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(nn.Sequential(*[Block() for _ in range(layers)]).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
rows, kept_apart = torch.randn(batch, width, device=device), torch.randn(batch, width, device=device)

for step in range(10):
    optimizer.zero_grad()
    loss_of(model, rows).backward()
    optimizer.step()
    if rank == 0:
        with torch.no_grad():
            validation_loss = loss_of(model.module, kept_apart)
if rank == 0:
    print(f"validation loss: {validation_loss.item():.3f}")
dist.destroy_process_group()
