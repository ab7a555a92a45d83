"""Models that `keepbusy.spread` is tried on, written as their authors would, and small."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HEADS = 40, 32, 4


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = HEADS, WIDTH // HEADS, dropout
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.query_norm = nn.LayerNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        shape = (rows, length, self.num_heads, self.head_dim)
        query, key, value = (one(x).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        drop = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            self.query_norm(query), key, value, is_causal=True, dropout_p=drop
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention(dropout)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.drop(self.down(functional.gelu(self.up(self.second(x)))))


class GPT(nn.Module):
    """With positions as a bare parameter, and the words of input and output tied."""

    def __init__(self, tied: bool = True, dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Repeated(GPT):
    """Its blocks are computed again in the backward pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class PackedAttention(nn.Module):
    """Queries, keys and values of one layer: of equal width; or with fewer keys; or head by head. Which layer comes
    first is seen as it runs, not by which was made first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.heads, self.kv_heads, self.dim = kind, HEADS, HEADS // 2, WIDTH // HEADS
        self.out = nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH if kind == "fewer" else 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        packed = self.qkv(x)
        if self.kind == "fewer":
            sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
            q, k, v = (one.view(b, t, -1, self.dim).transpose(1, 2) for one in packed.split(sizes, -1))
        elif self.kind == "by head":
            q, k, v = packed.view(b, t, self.heads, 3, self.dim).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = packed.reshape(b, t, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kind == "fewer")
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))


class PackedBlock(nn.Module):
    """Its gate and what it gates are one layer, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(WIDTH), PackedAttention(kind), nn.LayerNorm(WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        gate, up = self.gate_up(self.second(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(PackedBlock(kind) for kind in ("equal", "fewer", "by head")))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens)))


class Basic(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.norm(self.first(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(*(Basic(8) for _ in range(3)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(functional.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Encoder(nn.Module):
    """PyTorch's own layers, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(tokens)))
