"""Answers are sampled token by token from a CUDA graph with a cache of fixed length; whether all have ended is asked every 64 tokens."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import size

BATCH, LENGTH, WIDTH, HEADS, LAYERS, VOCAB = size(96, 2), size(512, 16), size(1024, 32), size(16, 2), size(16, 2), size(16384, 64)
KIND = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(BATCH, HEADS, LENGTH, WIDTH // HEADS))
        self.register_buffer("values", torch.zeros(BATCH, HEADS, LENGTH, WIDTH // HEADS))

    def forward(self, x, place, mask):
        q, k, v = self.qkv(self.before(x)).view(BATCH, 3, HEADS, 1, WIDTH // HEADS).unbind(1)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        seen = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(seen.reshape(BATCH, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, token, place):
        x = self.embed(token) + self.places(place)
        mask = (torch.arange(LENGTH, device=x.device) <= place).view(1, 1, 1, LENGTH).expand(BATCH, HEADS, 1, LENGTH)
        for block in self.blocks:
            x = block(x, place, mask)
        return F.linear(self.norm(x), self.embed.weight).float()


class Sampler:
    """`token`, `place` and `ended` stay where they are, so that one step can be replayed."""

    def __init__(self, model):
        self.model, self.graph = model, None
        with torch.device(DEVICE):
            self.token, self.place = torch.zeros(BATCH, dtype=torch.long), torch.zeros(1, dtype=torch.long)
            self.ended, self.text = torch.zeros(BATCH, dtype=torch.bool), torch.zeros(BATCH, LENGTH, dtype=torch.long)

    def once(self):
        best, which = (self.model(self.token, self.place) / 0.8).topk(50)
        drawn = (best.softmax(1) / torch.empty_like(best).exponential_()).argmax(1, keepdim=True)
        token = which.gather(1, drawn)[:, 0].masked_fill(self.ended, 0)
        self.token.copy_(token)
        self.text.index_copy_(1, self.place, token[:, None])
        self.ended |= token == 1
        self.place += 1

    def capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.once(), self.once()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.once()

    def start(self, seed):
        self.token.fill_(2 + seed), self.place.zero_(), self.ended.zero_()


@torch.inference_mode()
def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        sampler = Sampler(Decoder().to(KIND).eval())
    if DEVICE == "cuda":
        sampler.capture()
    answers = []
    for answer in range(turns(8, 2)):
        sampler.start(answer)
        for place in range(LENGTH):
            sampler.graph.replay() if sampler.graph else sampler.once()
            if place % 16 == 15:
                tick()
            if place % 64 == 63 and not fixed and sampler.ended.all():
                break
        answers.append(sampler.text.clone())
    torch.stack(answers).cpu()


if __name__ == "__main__":
    run(main)
