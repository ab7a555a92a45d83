# Small residual network on synthetic 96x96 photographs, with the usual
# geometric and colour augmentation done in numpy by the data set.
import os
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

t_begin = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL", "0") == "1"
DEV = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEV == "cuda"

cfg = dict(size=96, batch=64, train=3584, val=1024, epochs=4, width=64, classes=10)
if SMALL:
    cfg.update(size=48, batch=16, train=160, val=32, epochs=2, width=8)


def synth_images(n, seed):
    """Class-dependent gratings and blobs, uint8 NHWC."""
    rng = np.random.default_rng(seed)
    s = cfg["size"]
    labels = rng.integers(0, cfg["classes"], n)
    yy, xx = np.mgrid[0:s, 0:s].astype(np.float32) / s
    protos = np.stack([
        np.stack([np.sin(2 * np.pi * ((1 + k % 4) * xx + (1 + k // 4) * yy) + c) for c in range(3)], -1)
        for k in range(cfg["classes"])])
    protos = ((protos * 0.35 + 0.5) * 255).astype(np.uint8)
    noise = rng.integers(0, 60, (64, s, s, 3), dtype=np.uint8)
    imgs = protos[labels] // 2 + noise[rng.integers(0, 64, n)]
    return imgs, labels.astype(np.int64)


class Augmented(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        s = images.shape[1]
        yy, xx = np.mgrid[0:s, 0:s].astype(np.float32)
        self.grid = np.stack([xx - s / 2, yy - s / 2])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        rng = np.random.default_rng()
        img = self.images[i]
        s = img.shape[0]
        ang, zoom = rng.uniform(-0.3, 0.3), rng.uniform(0.85, 1.15)
        c, d = np.float32(np.cos(ang) * zoom), np.float32(np.sin(ang) * zoom)
        x = np.clip(c * self.grid[0] - d * self.grid[1] + s / 2, 0, s - 1.001)
        y = np.clip(d * self.grid[0] + c * self.grid[1] + s / 2, 0, s - 1.001)
        x0, y0 = x.astype(np.int32), y.astype(np.int32)
        fx, fy = (x - x0)[..., None], (y - y0)[..., None]
        top = img[y0, x0] * (1 - fx) + img[y0, x0 + 1] * fx
        bot = img[y0 + 1, x0] * (1 - fx) + img[y0 + 1, x0 + 1] * fx
        out = top * (1 - fy) + bot * fy
        if rng.random() < 0.5:
            out = out[:, ::-1]
        gain = rng.uniform(0.8, 1.2, 3).astype(np.float32)
        out = (out - 128) * gain + 128 + rng.uniform(-15, 15)
        out = np.clip(out, 0, 255).astype(np.uint8)
        return torch.from_numpy(np.ascontiguousarray(out.transpose(2, 0, 1))), int(self.labels[i])


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.c1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.b1 = nn.BatchNorm2d(cout)
        self.c2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(cout)
        self.skip = nn.Identity() if cin == cout else nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.b1(self.c1(x)), inplace=True)
        return F.relu(self.b2(self.c2(h)) + self.skip(x), inplace=True)


def build_net():
    w = cfg["width"]
    return nn.Sequential(
        nn.Conv2d(3, w, 5, 2, 2), nn.ReLU(inplace=True),
        Block(w, w, 1), Block(w, 2 * w, 2), Block(2 * w, 2 * w, 1), Block(2 * w, 4 * w, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, cfg["classes"]))


def normalise(u8):
    return u8.float().div_(127.5).sub_(1.0).contiguous(memory_format=torch.channels_last)


torch.manual_seed(1)
train_x, train_y = synth_images(cfg["train"], 1)
val_x, val_y = synth_images(cfg["val"], 2)
workers = min(12, max(1, (os.cpu_count() or 2) - 2)) if FIXED else 0
loader = DataLoader(Augmented(train_x, train_y), batch_size=cfg["batch"], shuffle=True, drop_last=True,
                    pin_memory=CUDA, num_workers=workers, persistent_workers=workers > 0)  # FAULT
# the validation pictures are small enough to stay on the device
val_x = torch.from_numpy(val_x).permute(0, 3, 1, 2).contiguous().to(DEV)
val_y = torch.from_numpy(val_y).to(DEV)

net = build_net().to(DEV, memory_format=torch.channels_last)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=CUDA)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=cfg["epochs"] * len(loader))

for epoch in range(cfg["epochs"]):
    net.train()
    seen, loss_sum = 0, torch.zeros((), device=DEV)
    for step, (x, y) in enumerate(loader):
        x = x.to(DEV, non_blocking=True)
        y = y.to(DEV, non_blocking=True)
        loss = F.cross_entropy(net(normalise(x)), y, label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        loss_sum += loss.detach()
        seen += 1
    net.eval()
    with torch.no_grad():
        hits = sum((net(normalise(vx)).argmax(1) == vy).sum()
                   for vx, vy in zip(val_x.split(256), val_y.split(256)))
    print(f"[{epoch}] loss {loss_sum.item() / seen:.3f} acc {hits.item() / len(val_y):.3f}", flush=True)

if CUDA:
    torch.cuda.synchronize()
print("RUN_SECONDS %.3f" % (time.perf_counter() - t_begin))
