"""Pixel-space DDPM on synthetic textures, scored by precision / recall (k-NN) on random features."""
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

WALL0 = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_float32_matmul_precision("high")

SIZE = 16 if SMALL else 32
BATCH = 16 if SMALL else 128
CH = 16 if SMALL else 96
STEPS = 30 if SMALL else 800
EVAL_EVERY = 15 if SMALL else 100
N_EVAL = 64 if SMALL else 1280
SAMPLER_STEPS = 5 if SMALL else 20
T = 1000


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    ang = t.float()[:, None] * freqs
    return torch.cat([ang.sin(), ang.cos()], dim=1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(8, cin), nn.GroupNorm(8, cout)
        self.c1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.c2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.t = nn.Linear(temb, cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, e):
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.t(e)[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(h)))


class TinyUNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        te = 4 * c
        self.c = c
        self.time = nn.Sequential(nn.Linear(c, te), nn.SiLU(), nn.Linear(te, te), nn.SiLU())
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.d1, self.d2 = ResBlock(c, c, te), ResBlock(c, 2 * c, te)
        self.mid = ResBlock(2 * c, 2 * c, te)
        self.u2, self.u1 = ResBlock(4 * c, c, te), ResBlock(2 * c, c, te)
        self.out = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        e = self.time(timestep_embedding(t, self.c))
        a = self.d1(self.inp(x), e)
        b = self.d2(F.avg_pool2d(a, 2), e)
        m = self.mid(F.avg_pool2d(b, 2), e)
        m = F.interpolate(m, scale_factor=2, mode="nearest")
        u = self.u2(torch.cat([m, b], 1), e)
        u = F.interpolate(u, scale_factor=2, mode="nearest")
        return self.out(F.silu(self.u1(torch.cat([u, a], 1), e)))


def textures(n):
    g = torch.linspace(0, 2 * math.pi, SIZE, device=device)
    p = torch.rand(n, 3, 4, device=device)
    fx, fy = (p[..., 0] * 4)[..., None, None], (p[..., 1] * 4)[..., None, None]
    return torch.sin(fx * g[:, None] + fy * g[None, :] + p[..., 2, None, None] * 6.28)


class RandomFeatures(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 4, 2, 1), nn.ReLU(),
                                 nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, dim))

    @torch.no_grad()
    def forward(self, x):
        return torch.cat([self.net(c) for c in x.split(256)])


abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T, device=device), 0)


@torch.no_grad()
def ddim(model, n):
    x = torch.randn(n, 3, SIZE, SIZE, device=device)
    ts = torch.linspace(T - 1, 0, SAMPLER_STEPS + 1).long().tolist()
    for hi, lo in zip(ts[:-1], ts[1:]):
        t = torch.full((n,), hi, device=device)
        eps = model(x, t)
        x0 = ((x - (1 - abar[hi]).sqrt() * eps) / abar[hi].sqrt()).clamp(-1, 1)
        x = abar[lo].sqrt() * x0 + (1 - abar[lo]).sqrt() * eps
    return x0


def pairwise(a, b):
    if FIXED:
        return torch.cdist(a, b)
    a, b = a.cpu().numpy(), b.cpu().numpy()
    d = np.stack([np.sqrt(((b - row) ** 2).sum(axis=1)) for row in a])  # FAULT
    return torch.from_numpy(d).to(device)


def precision_recall(real, fake, k=3):
    rad_r = pairwise(real, real).kthvalue(k + 1, dim=1).values
    rad_f = pairwise(fake, fake).kthvalue(k + 1, dim=1).values
    cross = pairwise(real, fake)
    covered, found = (cross <= rad_r[:, None]).any(0), (cross <= rad_f[None, :]).any(1)
    return torch.stack([covered.float().mean(), found.float().mean()]).tolist()


torch.manual_seed(0)
with device:
    model, features = TinyUNet(CH), RandomFeatures()
opt = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=device.type == "cuda")
real_feats = features(textures(N_EVAL))
amp = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
acc = torch.zeros((), device=device)

for step in range(1, STEPS + 1):
    x0 = textures(BATCH)
    t = torch.randint(0, T, (BATCH,), device=device)
    noise = torch.randn_like(x0)
    s = abar[t][:, None, None, None]
    with amp:
        pred = model(s.sqrt() * x0 + (1 - s).sqrt() * noise, t)
    loss = F.mse_loss(pred.float(), noise)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    acc += loss.detach()
    if step % EVAL_EVERY == 0:
        with amp:
            fake = ddim(model, N_EVAL)
        prec, rec = precision_recall(real_feats, features(fake.float()))
        print(f"step {step:5d} mse {acc.item() / EVAL_EVERY:.4f} precision {prec:.3f} recall {rec:.3f}", flush=True)
        acc.zero_()

if device.type == "cuda":
    torch.cuda.synchronize()
print("RUN_SECONDS %.3f" % (time.perf_counter() - WALL0))
