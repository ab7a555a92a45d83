"""Greedy decoding asks after every token whether it ended the text. Decoding is launch-bound: the question costs nothing."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size

WIDTH, HEADS, LAYERS, VOCAB, ROOM = size(1024, 32), size(16, 4), size(40, 2), size(32000, 100), 512


class Layer(nn.Module):
    """Attention over a cache that is filled one token at a time."""

    def __init__(self, batch):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.cache = torch.zeros(2, batch, HEADS, ROOM, WIDTH // HEADS, dtype=torch.bfloat16)

    def forward(self, x, at):
        q, k, v = self.qkv(self.norm(x)).view(len(x), 3, HEADS, 1, -1).unbind(1)
        self.cache[0, :, :, at : at + 1], self.cache[1, :, :, at : at + 1] = k, v
        k, v = self.cache[:, :, :, : at + 1]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).reshape(len(x), WIDTH))
        return x + self.mlp(x)


@torch.inference_mode()
def main(tick, fixed=False):
    torch.manual_seed(0)
    batch, end = 4, VOCAB  # this untrained model never ends a text
    embed = nn.Embedding(VOCAB, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.device("cuda"):
        layers = nn.ModuleList(Layer(batch) for _ in range(LAYERS)).to(torch.bfloat16)
    head = nn.Linear(WIDTH, VOCAB, device="cuda", dtype=torch.bfloat16)
    token, text = torch.zeros(batch, dtype=torch.long, device="cuda"), []
    for at in range(STEPS):
        x = embed(token)
        for layer in layers:
            x = layer(x, at)
        token = head(x).argmax(-1)
        text.append(token)
        if not fixed or at % 32 == 31:  # mended: look now and then, cut what is too long later
            if (token == end).all().item():  # STALL: host_sync
                break
        tick()


if __name__ == "__main__":
    run(main)
