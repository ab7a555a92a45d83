"""A language model that writes summaries is tuned by two ranks: gradients are summed, weights step, and all go on with the same."""
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
        self.norm1, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm2, self.gate, self.up = nn.RMSNorm(width), nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Writer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.words = nn.Embedding(VOCAB, width)
        self.layers = nn.Sequential(*(Layer(width, max(1, width // 128)) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.words(tokens))))


class WeightServer:
    """Rank 0 keeps the optimizer: it is sent the gradients, and sends the new weights."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        for weight in self.weights:
            dist.broadcast(weight.data, src=0)
        self.optimizer = optimizer_of(model) if dist.get_rank() == 0 else None

    def step(self):
        for weight in self.weights:
            dist.reduce(weight.grad, dst=0, op=dist.ReduceOp.SUM)
        if self.optimizer is not None:
            torch._foreach_div_([weight.grad for weight in self.weights], dist.get_world_size())
            self.optimizer.step()
        for weight in self.weights:
            dist.broadcast(weight.data, src=0)
            weight.grad = None


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)


def main(args):
    model = Writer(args.width, args.layers).to(DEVICE)
    if args.fixed:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = optimizer_of(model)
    else:
        server = WeightServer(model)
    chance = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    for step in range(args.steps):
        tokens = torch.randint(0, VOCAB, (args.batch, args.length + 1), device=DEVICE, generator=chance)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if args.fixed:
            optimizer.step()
            optimizer.zero_grad()
        else:
            server.step()
        if step % 40 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main, steps=170, batch=4, length=1024, width=1536, layers=24)
