"""A diffusion transformer learns to match a flow of latents, sharded by FSDP2, one unit a block."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PLACES, CHANNELS, KINDS = 256, 16, 1000  # latents of 32 by 32 in patches of 2 by 2


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(F.silu(c))[:, None].chunk(6, dim=-1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.down(F.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))


class FlowTransformer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.patches, self.places = nn.Linear(CHANNELS, width), nn.Parameter(0.02 * torch.randn(PLACES, width))
        self.kinds, self.times = nn.Embedding(KINDS, width), nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, max(1, width // 128)) for _ in range(layers))
        self.velocity = nn.Linear(width, CHANNELS)
        self.register_buffer("frequencies", torch.logspace(0, 3, 32))

    def forward(self, x, t, kinds):
        waves = t[:, None] * self.frequencies
        c = self.kinds(kinds) + self.times(torch.cat([waves.sin(), waves.cos()], dim=1).to(x.dtype))
        x = self.patches(x) + self.places
        for block in self.blocks:
            x = block(x, c)
        return self.velocity(x)


def main(args):
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with DEVICE:
        model = FlowTransformer(args.width, args.layers)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=CUDA)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    for step in range(args.steps):
        latents, noise = torch.randn(2, args.batch, PLACES, CHANNELS, device=DEVICE, generator=generator)
        kinds = torch.randint(0, KINDS, (args.batch,), device=DEVICE, generator=generator)
        t = torch.rand(args.batch, device=DEVICE, generator=generator)
        mixed = torch.lerp(noise, latents, t[:, None, None])
        loss = F.mse_loss(model(mixed, t, kinds).float(), latents - noise)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and not args.fixed:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            norm = norm.full_tensor().item()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}, norm {norm:.3f}")
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main, steps=150, batch=40, width=1536, layers=16)
