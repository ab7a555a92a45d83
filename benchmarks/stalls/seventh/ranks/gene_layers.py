"""Expression of genes from their neighbours', by a very wide residual network whose layers two ranks share through DTensor."""
import torch
import torch.distributed as dist
import torch.nn as nn
from job import CUDA, DEVICE, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Mixing(nn.Module):
    def __init__(self, width, wider):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, wider, bias=False), nn.Linear(wider, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Expression(nn.Module):
    def __init__(self, genes, width, layers):
        super().__init__()
        self.enter, self.leave = nn.Linear(genes, width), nn.Linear(width, genes)
        self.layers = nn.ModuleList(Mixing(width, 4 * width) for _ in range(layers))

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def share(model, args):
    """Each linear layer's weights are cut in two, one half for each rank."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    if args.fixed:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    else:
        plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": ColwiseParallel(output_layouts=Replicate())}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def main(args):
    torch.manual_seed(0)
    with DEVICE:
        model = share(Expression(args.genes, args.width, args.layers).to(torch.bfloat16 if CUDA else torch.float32), args)
    shared = {name for name, _ in model.named_parameters() if ".up" in name or ".down" in name}
    groups = [[part for name, part in model.named_parameters() if (name in shared) == among] for among in (True, False)]
    optimizers = [torch.optim.AdamW(group, lr=1e-4, fused=CUDA) for group in groups]
    chance = torch.Generator(DEVICE).manual_seed(1)  # the same cells on both ranks
    total = torch.zeros((), device=DEVICE)
    for step in range(args.steps):
        cells = torch.randn(args.batch, args.genes, device=DEVICE, generator=chance, dtype=torch.bfloat16 if CUDA else torch.float32)
        hidden = torch.rand(cells.shape, device=DEVICE, generator=chance) < 0.3
        said = model(cells.masked_fill(hidden, 0))
        loss = ((said - cells).float().square() * hidden).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        total += loss.detach()
        if step % 40 == 39 and dist.get_rank() == 0:
            print(f"{step + 1}: loss {total.item() / (step + 1):.4f}")


if __name__ == "__main__":
    run(main, steps=140, batch=8192, genes=2048, width=4096, layers=10)
