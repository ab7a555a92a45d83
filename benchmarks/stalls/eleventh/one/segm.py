# Road-scene segmentation: encoder-decoder on 512x512 float frames that a
# previous stage has decoded into one big host buffer.
import os
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

BEGIN = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
CUDA = torch.cuda.is_available()
dev = torch.device("cuda" if CUDA else "cpu")

RES = 64 if SMALL else 512
BATCH = 4 if SMALL else 24
CLIPS = 4 if SMALL else 8          # batches in the host buffer
EPOCHS = 5 if SMALL else 72
BASE = 8 if SMALL else 32
NUM_CLASSES = 8


def decode_frames():
    """Fills the host buffers with frames [n,3,R,R] and masks [n,R,R]."""
    n = CLIPS * BATCH
    pin = CUDA and FIXED
    frames = torch.empty(n, 3, RES, RES, pin_memory=pin)
    masks = torch.empty(n, RES, RES, dtype=torch.uint8, pin_memory=pin)
    g = torch.Generator().manual_seed(0)
    base = torch.randn(BATCH, 3, RES, RES, generator=g) * 0.2
    lab = (torch.rand(BATCH, 1, RES // 32, RES // 32, generator=g) * NUM_CLASSES).floor()
    lab = F.interpolate(lab, size=(RES, RES), mode="nearest")
    base += lab / NUM_CLASSES - 0.5
    lab = lab[:, 0].to(torch.uint8)
    for c in range(CLIPS):
        frames[c * BATCH:(c + 1) * BATCH].copy_(base.roll(17 * c, dims=3))
        masks[c * BATCH:(c + 1) * BATCH].copy_(lab.roll(17 * c, dims=2))
    return frames, masks


def cbr(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class SegNet(nn.Module):
    def __init__(self, b, classes):
        super().__init__()
        self.stem = cbr(3, b, 2)
        self.e1 = cbr(b, b)
        self.e2 = nn.Sequential(cbr(b, 2 * b, 2), cbr(2 * b, 2 * b))
        self.e3 = nn.Sequential(cbr(2 * b, 4 * b, 2), cbr(4 * b, 4 * b))
        self.d2 = cbr(6 * b, 2 * b)
        self.d1 = cbr(3 * b, b)
        self.cls = nn.Conv2d(b, classes, 1)

    def forward(self, x):
        a = self.e1(self.stem(x))
        b = self.e2(a)
        c = self.e3(b)
        u = self.d2(torch.cat([F.interpolate(c, scale_factor=2, mode="nearest"), b], 1))
        u = self.d1(torch.cat([F.interpolate(u, scale_factor=2, mode="nearest"), a], 1))
        return self.cls(u)


def seg_loss(model, x, y):
    with torch.autocast(dev.type, torch.bfloat16, enabled=CUDA):
        logits = model(x.contiguous(memory_format=torch.channels_last))
    # the classifier works at half the resolution of the mask
    return logits, F.cross_entropy(logits.float(), y[:, ::2, ::2].long())


@torch.no_grad()
def mean_iou(model, x, y):
    model.eval()
    logits, _ = seg_loss(model, x, y)
    pred, true = logits.argmax(1).flatten(), y[:, ::2, ::2].long().flatten()
    conf = torch.zeros(NUM_CLASSES * NUM_CLASSES, device=dev)
    conf.scatter_add_(0, true * NUM_CLASSES + pred, torch.ones(true.shape, device=dev))
    conf = conf.view(NUM_CLASSES, NUM_CLASSES)
    inter = conf.diagonal()
    model.train()
    return (inter / (conf.sum(0) + conf.sum(1) - inter).clamp_min(1)).mean().item()


torch.manual_seed(4)
rng = np.random.default_rng(4)
frames, masks = decode_frames()
held_x, held_y = frames[:BATCH].roll(5, dims=3).to(dev), masks[:BATCH].roll(5, dims=2).to(dev)

model = SegNet(BASE, NUM_CLASSES).to(dev, memory_format=torch.channels_last)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=CUDA)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS)

for epoch in range(EPOCHS):
    total = torch.zeros((), device=dev)
    for c in rng.permutation(CLIPS):
        s = slice(c * BATCH, (c + 1) * BATCH)
        x, y = frames[s].to(dev, non_blocking=True), masks[s].to(dev, non_blocking=True)  # FAULT
        if rng.random() < 0.5:
            x, y = x.flip(3), y.flip(2)
        _, loss = seg_loss(model, x, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        total += loss.detach()
    sched.step()
    if (epoch + 1) % 12 == 0 or epoch + 1 == EPOCHS:
        print(f"epoch {epoch + 1}: loss {total.item() / CLIPS:.4f}  mIoU {mean_iou(model, held_x, held_y):.4f}",
              flush=True)

if CUDA:
    torch.cuda.synchronize()
print("RUN_SECONDS %.3f" % (time.perf_counter() - BEGIN))
