"""Samples pictures by DDPM with guidance; each picture has a seed of its own, and its noise is drawn from a generator on the host."""
import torch
import torch.nn as nn
from script import DEVICE, run, turns

from models import UNet, size

BATCH, EDGE, LEVELS = size(48, 2), size(128, 16), 1000


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.time, self.label = UNet(64), nn.Embedding(LEVELS, 3), nn.Embedding(11, 3)

    def forward(self, x, t, label):
        x = x + (self.time(t) + self.label(label))[:, :, None, None]
        return self.net(x.contiguous(memory_format=torch.channels_last))


def noise(generators):
    return torch.stack([torch.randn(3, EDGE, EDGE, generator=each, device=each.device) for each in generators]).to(DEVICE)  # STALL: made_on_host


@torch.inference_mode()
def sample(model, seeds, labels, steps, where, tick):
    generators = [torch.Generator(where).manual_seed(seed) for seed in seeds]
    betas = torch.linspace(1e-4, 0.02, LEVELS, dtype=torch.float64)
    alphas = (1 - betas).cumprod(0)
    x = noise(generators)
    both, none = torch.cat([labels, torch.full_like(labels, 10)]), None
    times = torch.linspace(LEVELS - 1, 0, steps).long().tolist()
    for t, before in zip(times, [*times[1:], -1]):
        level = torch.full((2 * len(x),), t, device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            guided, none = model(torch.cat([x, x]), level, both).float().chunk(2)
        epsilon = none + 4.0 * (guided - none)
        now, then = alphas[t].item(), alphas[before].item() if before >= 0 else 1.0
        clean = ((x - (1 - now) ** 0.5 * epsilon) / now**0.5).clamp(-1, 1)
        step = now / then
        mean = then**0.5 * (1 - step) / (1 - now) * clean + step**0.5 * (1 - then) / (1 - now) * x
        x = mean + ((1 - then) / (1 - now) * (1 - step)) ** 0.5 * noise(generators)
        tick()
    return ((x + 1) * 127.5).clamp(0, 255).byte().cpu()


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Denoiser().to(memory_format=torch.channels_last).eval()
        labels = torch.arange(BATCH) % 10
    sample(model, range(BATCH), labels, turns(210, 2), DEVICE if fixed else "cpu", tick)


if __name__ == "__main__":
    run(main)
