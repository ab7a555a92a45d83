"""A GPT of a billion parameters, written for one GPU but for the call of `spread`. Arguments: sequences, steps, and its
width and layers."""

import sys

import torch
from told import loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

import keepbusy

LENGTH, WORDS = 1024, 50304
BATCH, STEPS, WIDTH, LAYERS = [*map(int, sys.argv[1:]), *(16, 14, 2048, 16)[len(sys.argv) - 1 :]]


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (one.view(b, t, self.heads, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, 16)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, y):
        h = self.tokens(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())


torch.manual_seed(0)
with torch.device("cuda"):
    model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
data = torch.utils.data.TensorDataset(*(torch.randint(WORDS, (BATCH * STEPS, LENGTH)) for _ in range(2)))
loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
example = tuple(one[:2] for one in data.tensors)
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, example=example)
for x, y in loop(loader):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x.cuda(), y.cuda())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
