"""torchrun: tensor parallel by hand. After each all-reduce the device is waited for, and NaN is looked for, "to be safe"."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import size

BATCH, LENGTH, WIDTH, HEADS, LAYERS = size(8, 2), size(256, 8), size(1024, 32), size(16, 4), size(12, 2)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_, slope):
        return slope


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, slope):
        slope = slope.clone()
        dist.all_reduce(slope)
        return slope


class Layer(nn.Module):
    """Heads and hidden units are shared out over the ranks; norms are whole on each."""

    def __init__(self, ranks, careful):
        super().__init__()
        self.heads, self.careful = HEADS // ranks, careful
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH // ranks, bias=False), nn.Linear(WIDTH // ranks, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH // ranks, bias=False), nn.Linear(4 * WIDTH // ranks, WIDTH, bias=False)

    def whole(self, x):
        x = Sum.apply(x)
        if self.careful and torch.isnan(x).any():  # STALL: host_sync
            raise FloatingPointError("a layer gave NaN")
        return x

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(Copy.apply(self.norm1(x))).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.whole(self.out(mixed))
        return x + self.whole(self.down(F.gelu(self.up(Copy.apply(self.norm2(x))))))


def main(tick, fixed=False):
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    with torch.device(DEVICE):
        words = nn.Embedding(8192, WIDTH)
        layers = nn.ModuleList(Layer(ranks, careful=not fixed) for _ in range(LAYERS))
    parameters = [*words.parameters(), *layers.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=DEVICE == "cuda")
    for step in range(turns(500, 2)):
        tokens = torch.randint(0, 8192, (BATCH, LENGTH), device=DEVICE)
        dist.broadcast(tokens, 0)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            x = words(tokens)
            for layer in layers:
                x = layer(x)
            loss = F.cross_entropy((x[:, :-1] @ words.weight.T).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
