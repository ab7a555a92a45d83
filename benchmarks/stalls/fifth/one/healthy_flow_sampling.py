"""Pictures sampled from a DiT by Heun's method for flows, with previews on the way: the device has work throughout."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import DEVICE, run, size, turns

BATCH, EDGE, CHANNELS, WIDE, DEEP, HEADS, LABELS = size(96, 2), size(64, 8), 4, size(1152, 32), size(20, 2), size(16, 2), 1000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDE, elementwise_affine=False), nn.LayerNorm(WIDE, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.mlp = nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU("tanh"), nn.Linear(4 * WIDE, WIDE))
        self.modulate = nn.Linear(WIDE, 6 * WIDE)

    def forward(self, x, condition):
        shift, scale, gate, shift2, scale2, gate2 = self.modulate(F.silu(condition))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.one(x) * (1 + scale) + shift).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.two(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.place = nn.Conv2d(CHANNELS, WIDE, 2, 2), nn.Parameter(torch.randn((EDGE // 2) ** 2, WIDE) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, WIDE), nn.SiLU(), nn.Linear(WIDE, WIDE))
        self.label = nn.Embedding(LABELS + 1, WIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(DEEP))
        self.norm, self.out = nn.LayerNorm(WIDE), nn.Linear(WIDE, CHANNELS * 4)

    def forward(self, x, t, label):
        waves = t[:, None] * 1000 * torch.exp(-torch.arange(128, device=x.device) / 128 * 9.2)
        condition = self.time(torch.cat([waves.cos(), waves.sin()], 1).to(x.dtype)) + self.label(label)
        x = self.patch(x).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x, condition)
        return F.pixel_shuffle(self.out(self.norm(x)).mT.unflatten(2, (EDGE // 2, -1)), 2)


def preview(x, step):
    small = F.interpolate(x[:4, :3].float(), scale_factor=0.5)
    return step, (small.clamp(-1, 1) * 127.5 + 127.5).byte().cpu().numpy()


@torch.inference_mode()
def main(variant):
    kind = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    with torch.device(DEVICE):
        model = DiT().to(kind).eval()
        labels = torch.arange(BATCH) % LABELS
    both = torch.cat([labels, torch.full_like(labels, LABELS)])
    times, previews, largest = torch.linspace(0, 1, turns(12, 2) + 1) ** 1.2, [], []

    def velocity(x, t):
        level = torch.full((2 * BATCH,), t, device=DEVICE)
        with_label, without = model(torch.cat([x, x]).to(kind), level, both).float().chunk(2)
        return without + 3.0 * (with_label - without)

    x = torch.randn(BATCH, CHANNELS, EDGE, EDGE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for step, (now, then) in enumerate(zip(times, times[1:])):
        slope = velocity(x, now.item())
        guess = x + (then - now).item() * slope
        x = x + (then - now).item() * 0.5 * (slope + velocity(guess, then.item()))
        if variant == "stalled":
            largest.append(x.abs().max().item())
            if not torch.isfinite(x).all():
                raise FloatingPointError(f"step {step}")
            previews.append(preview(x, step))
    if variant == "fixed":
        previews.append(preview(x, step))
    print(f"{len(previews)} previews, deviation {x.std().item():.3f}")


if __name__ == "__main__":
    run(main)
