"""Sounds of streets are freed from noise by a net which two ranks train each for itself; every so often an outer step brings them together."""
import torch
import torch.distributed as dist
import torch.nn as nn
from job import CUDA, DEVICE, run


class Cleaner(nn.Module):
    def __init__(self, bands, width, layers):
        super().__init__()
        self.enter, self.level, self.leave = nn.Linear(bands, width), nn.Linear(1, width), nn.Linear(width, bands)
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, noisy, level):
        return self.leave(self.body(self.enter(noisy) + self.level(level)))


class Outer:
    """The mean of what the ranks changed is a gradient for the weights they began with: SGD with Nesterov's momentum, kept in the host's memory."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.place, self.group = torch.device("cpu"), dist.new_group(backend="gloo")
        self.begin()

    def begin(self):
        for weight in self.weights:
            dist.broadcast(weight.data, src=0)
        self.kept = [weight.detach().to(self.place, copy=True) for weight in self.weights]
        self.optimizer = torch.optim.SGD(self.kept, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def step(self):
        for kept, weight in zip(self.kept, self.weights):
            kept.grad = kept - weight.detach().to(self.place)
            dist.all_reduce(kept.grad, group=self.group)
            kept.grad /= dist.get_world_size()
        self.optimizer.step()
        for kept, weight in zip(self.kept, self.weights):
            weight.copy_(kept)


class OuterOnDevice(Outer):
    def __init__(self, model):
        self.weights = list(model.parameters())
        self.place, self.group = DEVICE, None
        self.begin()


def sounds(args, chance):
    """Hums and clatter, and the same with noise."""
    times = torch.arange(args.frames, device=DEVICE)[:, None] / 40
    pitch = torch.rand(args.batch, 1, args.bands, device=DEVICE, generator=chance)
    clean = torch.sin(times * pitch * 6) * pitch
    level = torch.rand(args.batch, 1, 1, device=DEVICE, generator=chance)
    return clean, clean + level * torch.randn(clean.shape, device=DEVICE, generator=chance), level


def main(args):
    model = Cleaner(args.bands, args.width, args.layers).to(DEVICE)
    outer = (OuterOnDevice if args.fixed else Outer)(model)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=CUDA)
    chance = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    total = torch.zeros((), device=DEVICE)
    for step in range(1, args.steps + 1):
        clean, noisy, level = sounds(args, chance)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
            said = model(noisy, level)
        loss = (said.float() - clean).square().mean()
        inner.zero_grad()
        loss.backward()
        inner.step()
        total += loss.detach()
        if step % args.every == 0:
            outer.step()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"mean loss {total.item() / args.steps / dist.get_world_size():.4f}")


if __name__ == "__main__":
    run(main, steps=66, every=20, batch=64, frames=512, bands=128, width=1024, layers=8)
