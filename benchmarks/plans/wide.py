"""Wide layers in bfloat16 with small batches: much to send for what is computed."""

import torch
from told import loop
from torch import nn

import keepbusy

WIDTH, LAYERS, BATCH, STEPS = 6144, 8, 2048, 14


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
with torch.device("cuda"):
    model = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS))).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randn(BATCH * STEPS, WIDTH, dtype=torch.bfloat16))
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, pin_memory=torch.cuda.is_available())
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, example=data.tensors[0][:16])
for (x,) in loop(loader):
    loss = model(x.cuda(non_blocking=True)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
