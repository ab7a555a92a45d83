"""A language model under DDP that tells how the prompts on its wall go on, every so often."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.nn.parallel import DistributedDataParallel

VOCAB = 8192


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Storyteller(nn.Module):
    def __init__(self, width, layers, length):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(Layer(width, max(1, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.words(tokens) + self.places[: tokens.shape[1]])))


@torch.no_grad()
def continued(net, prompts, more, generator):
    net.eval()
    story = prompts
    for _ in range(more):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            scores = net(story)[:, -1].float() / 0.8
        lowest = scores.topk(50).values[:, -1:]
        likely = scores.masked_fill(scores < lowest, -torch.inf).softmax(-1)
        story = torch.cat([story, torch.multinomial(likely, 1, generator=generator)], dim=1)
    net.train()
    return story


def show_samples(net, prompts, args, generator, step):
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.fixed:
        mine = continued(net, prompts[rank::world], args.more, generator)
        stories = [torch.empty_like(mine) for _ in range(world)] if rank == 0 else None
        dist.gather(mine, stories)
    elif rank == 0:
        stories = [continued(net, prompt[None], args.more, generator) for prompt in prompts]
    if rank == 0:
        print(f"step {step}: {torch.cat(stories)[0, -8:].tolist()}", flush=True)


def main(args):
    net = Storyteller(args.width, args.layers, args.length).to(DEVICE)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=CUDA)
    text = torch.Generator(DEVICE).manual_seed(1 + dist.get_rank())
    chance = torch.Generator(DEVICE).manual_seed(99)
    prompts = torch.randint(0, VOCAB, (8, 16), device=DEVICE, generator=chance)
    for step in range(1, args.steps + 1):
        tokens = torch.randint(0, VOCAB, (args.batch, args.length + 1), device=DEVICE, generator=text) // 3
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.every == 0:
            show_samples(net, prompts, args, chance, step)
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main, steps=180, every=30, batch=16, length=512, width=1024, layers=14, more=48)
