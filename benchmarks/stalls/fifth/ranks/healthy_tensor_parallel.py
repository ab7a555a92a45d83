"""torchrun: a large MLP network split by tensor parallelism; its sums over the ranks cannot be hidden, and nothing is to be gained."""
import torch
import torch.distributed as dist
import torch.nn as nn
from setting import DEVICE, run, size, turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TOKENS, WIDE, LAYERS = size(16384, 8), size(4096, 32), size(12, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(variant):
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(DEVICE, torch.bfloat16)
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for step in range(turns(80, 2)):
        x = torch.randn(TOKENS, WIDE, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        loss = (model(x).float() - x.float().roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if variant == "stalled" and step % 20 == 0:
            dist.barrier()
            value = loss.item()
            if dist.get_rank() == 0:
                print(f"step {step}: {value:.4f}")
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main)
