"""Answers to batches of prompts, token by token with a cache of keys and values, until every row has ended."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import size

ROWS, PROMPT, TOKENS, WIDTH, HEADS, LAYERS, VOCAB, END = size(16, 2), size(32, 4), size(160, 6), size(1024, 32), 16, size(16, 2), size(16384, 64), 0
ROOM = PROMPT + TOKENS


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(ROWS, HEADS, ROOM, WIDTH // HEADS))

    def forward(self, x, place, mask):
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(ROOM, WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("causal", torch.ones(ROOM, ROOM, dtype=torch.bool).tril())

    def forward(self, tokens, place):
        x, mask = self.words(tokens) + self.places(place), self.causal[place]
        for layer in self.layers:
            x = layer(x, place, mask)
        return self.head(x[:, -1:])


def pick(logits):
    scores = logits[:, -1].float() / 0.8
    return (scores.softmax(1) / torch.empty_like(scores).exponential_(1)).argmax(1, keepdim=True)


class Recorded:
    """The step for one token as a CUDA graph, which reads and writes the same tensors each time."""

    def __init__(self, model):
        self.token, self.place = torch.zeros(ROWS, 1, dtype=torch.long, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                pick(model(self.token, self.place))
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.token.copy_(pick(model(self.token, self.place)))
            self.place.add_(1)


@torch.no_grad()
def answer(model, prompt, recorded):
    place = torch.arange(PROMPT, device=DEVICE)
    token, place = pick(model(prompt, place)), place[-1:] + 1
    ended, out = token == END, [token]
    if recorded:
        recorded.token.copy_(token), recorded.place.copy_(place)
    for number in range(1, TOKENS):
        if recorded:
            recorded.graph.replay()
            token = recorded.token.clone()
        else:
            token, place = pick(model(token, place)), place + 1  # STALL: launch_bound
        out.append(token)
        ended |= token == END
        if recorded and number % 16:
            continue
        if ended.all():  # STALL: host_sync
            break
    return torch.cat(out, 1).tolist()


@torch.no_grad()
def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Model().to(torch.bfloat16)
    recorded = Recorded(model) if fixed and DEVICE == "cuda" else None
    for _ in range(turns(18, 2)):
        answer(model, torch.randint(1, VOCAB, (ROWS, PROMPT), device=DEVICE), recorded)
        tick()


if __name__ == "__main__":
    run(main)
