"""Train a small GPT on a text, and tell its mean loss."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda"
vocabulary, length, batch, width, heads, layers = 8192, 1024, 32, 768, 12, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places.weight))


def next_batch():
    """Stretches of the text, from random places."""
    starts = torch.randperm(len(text) - length)[:batch]
    stretches = torch.stack([text[start : start + length + 1] for start in starts]).pin_memory()
    return stretches.to(device, non_blocking=True)


text = torch.randint(vocabulary, (1_000_000,))
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

running_loss = 0.0
for step in range(1, 11):
    stretches = next_batch()
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(stretches[:, :-1]).flatten(0, 1), stretches[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running_loss += loss.item()
    if step % 5 == 0:
        print(f"step {step}: mean loss {running_loss / step:.3f}")
