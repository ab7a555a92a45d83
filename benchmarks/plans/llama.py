"""A language model as they are built now: RMS norms, gated layers, fewer keys than queries."""

import torch
from told import loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

import keepbusy

WIDTH, HIDDEN, LAYERS, HEADS, GROUPS, LENGTH, WORDS, BATCH, STEPS = 1536, 4096, 16, 12, 4, 2048, 32000, 8, 14


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, GROUPS, WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * self.head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (one(x).view(b, t, self.num_key_value_heads, self.head_dim).transpose(1, 2) for one in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, y):
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())


torch.manual_seed(0)
with torch.device("cuda"):
    model = Llama()
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
