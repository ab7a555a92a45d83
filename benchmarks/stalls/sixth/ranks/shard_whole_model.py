"""A masked language model of 1.2 billion parameters, sharded by FSDP2."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, MASK = 16384, 1


class MaskedLanguage(nn.Module):
    def __init__(self, width, layers, length):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 128), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded(model, args):
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.fixed:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main(args):
    with DEVICE:
        model = sharded(MaskedLanguage(args.width, args.layers, args.length), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    for step in range(args.steps):
        tokens = torch.randint(2, VOCAB, (args.batch, args.length), device=DEVICE, generator=generator)
        hidden = torch.rand(tokens.shape, device=DEVICE, generator=generator) < 0.15
        scores = model(tokens.masked_fill(hidden, MASK))
        loss = F.cross_entropy(scores.float().flatten(0, 1), tokens.masked_fill(~hidden, -100).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main, steps=160, batch=5, length=512, width=2048, layers=23)
