"""Teach a small U-Net to take noise out of pictures: the training step of a diffusion model."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda"
pictures, edge, noises = 128, 128, 1000


class Residual(nn.Module):
    """Two convolutions beside a shortcut, told how noisy the picture is."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.told = nn.Linear(256, outputs)
        self.first = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, level):
        return self.shortcut(x) + self.second(self.first(x) + self.told(level)[:, :, None, None])


class UNet(nn.Module):
    def __init__(self, widths=(32, 64, 128, 256)):
        super().__init__()
        self.level = nn.Embedding(noises, 256)
        self.begin, self.end = nn.Conv2d(3, widths[0], 2, stride=2), nn.ConvTranspose2d(widths[0], 3, 2, stride=2)
        self.down = nn.ModuleList(Residual(a, b) for a, b in zip(widths, widths[1:]))
        self.up = nn.ModuleList(Residual(b + b, a) for a, b in zip(widths, widths[1:]))

    def forward(self, x, level):
        level, x, kept = self.level(level), self.begin(x), []
        for block in self.down:
            x = block(x, level)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in reversed(self.up):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], dim=1), level)
        return self.end(x)


clean = torch.rand(pictures, 3, edge, edge, device=device)
remains = torch.linspace(1, 0, noises, device=device)
model = UNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for step in range(10):
    level = torch.randint(noises, (pictures,), device=device)
    noise = torch.randn(clean.shape).to(device)
    share = remains[level, None, None, None]
    with torch.autocast(device, dtype=torch.bfloat16):
        guess = model(share.sqrt() * clean + (1 - share).sqrt() * noise, level)
        loss = F.mse_loss(guess, noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"the last loss: {loss.item():.3f}")
