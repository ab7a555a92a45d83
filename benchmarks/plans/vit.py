"""A vision transformer, base size, on pictures of 224 by 224."""

import torch
from told import loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

import keepbusy

WIDTH, LAYERS, HEADS, BATCH, STEPS = 768, 12, 12, 128, 14


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp(self.n2(x))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.places = nn.Parameter(torch.randn(196, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).mT + self.places)).mean(1))


torch.manual_seed(0)
model = Vision().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
data = torch.utils.data.TensorDataset(torch.rand(BATCH * 4, 3, 224, 224), torch.randint(1000, (BATCH * 4,)))
picks = torch.utils.data.RandomSampler(data, replacement=True, num_samples=BATCH * STEPS)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=picks, pin_memory=torch.cuda.is_available())
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, example=data.tensors[0][:2])
for x, y in loop(loader):
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x.cuda(non_blocking=True)).float(), y.cuda(non_blocking=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
