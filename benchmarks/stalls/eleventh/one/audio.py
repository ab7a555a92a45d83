"""Keyword spotting on one-second clips: waveform augmentation in loader
workers, log-mel on the device, 2-d convolutional network, weight averaging."""
import copy
import math
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

TIC = time.perf_counter()
SMALL = os.environ.get("BLIND_SMALL") == "1"
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

RATE = 4000 if SMALL else 16000
N_TRAIN, N_VAL = (160, 32) if SMALL else (19200, 256)
BATCH = 16 if SMALL else 64
EPOCHS = 2 if SMALL else 3
WIDTH = 8 if SMALL else 128
MELS = 40 if SMALL else 80
WORDS = 12
N_WORKERS = 1 if SMALL else 8


def synth_clips(n, seed):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, WORDS, n)
    t = np.arange(RATE, dtype=np.float32) / RATE
    bank = np.stack([np.sin(2 * np.pi * (150 + 60 * w) * t * (1 + 0.3 * t * (w % 3))) for w in range(WORDS)])
    bank = (bank * np.hanning(RATE) * 9000).astype(np.int16)
    return bank, label


class Clips(Dataset):
    def __init__(self, bank, label, train):
        self.bank, self.label, self.train = bank, label, train
        rng = np.random.default_rng(5)
        self.noises = rng.standard_normal((16, RATE), dtype=np.float32) * 800

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        rng = np.random.default_rng() if self.train else np.random.default_rng(i)
        w = self.bank[self.label[i]].astype(np.float32)
        w = np.roll(w, rng.integers(-RATE // 8, RATE // 8)) * rng.uniform(0.3, 1.2)
        if self.train:
            w += np.roll(self.noises[rng.integers(16)], rng.integers(RATE)) * rng.uniform(0.2, 2.0)
        else:
            w += self.noises[i % 16]
        return torch.from_numpy(np.clip(w, -32767, 32767).astype(np.int16)), int(self.label[i])


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_fft, self.hop = RATE // 40 * 2, RATE // 100
        bins = self.n_fft // 2 + 1
        mel = lambda f: 2595 * math.log10(1 + f / 700)
        edges = 700 * (10 ** (np.linspace(mel(40), mel(RATE / 2), MELS + 2) / 2595) - 1)
        f = np.linspace(0, RATE / 2, bins)
        up = (f[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        down = (edges[2:, None] - f[None]) / (edges[2:] - edges[1:-1])[:, None]
        fb = np.maximum(0, np.minimum(up, down)).astype(np.float32)
        self.register_buffer("fb", torch.from_numpy(fb))
        self.register_buffer("window", torch.hann_window(self.n_fft))

    def forward(self, pcm):
        spec = torch.stft(pcm.float() / 32768, self.n_fft, self.hop, window=self.window, return_complex=True)
        return ((self.fb @ torch.view_as_real(spec).square().sum(-1)) + 1e-5).log()[:, None] * 0.2 + 1


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1, self.c2 = (nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2))
        self.b1, self.b2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x)), inplace=True))), inplace=True)


def network():
    w = WIDTH
    return nn.Sequential(
        nn.Conv2d(1, w, 3, padding=1, bias=False), nn.BatchNorm2d(w), nn.ReLU(inplace=True), Res(w), Res(w),
        nn.Conv2d(w, 2 * w, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * w), nn.ReLU(inplace=True),
        Res(2 * w), Res(2 * w), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * w, WORDS))


class Average:
    def __init__(self, model, decay=0.995):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.src, self.dst, self.w = list(model.parameters()), list(self.model.parameters()), 1 - decay

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.dst, self.src, self.w)

    def sync_buffers(self, live):
        torch._foreach_copy_(list(self.model.buffers()), list(live.buffers()))


def main():
    torch.manual_seed(0)
    bank, label = synth_clips(N_TRAIN + N_VAL, 0)
    train = DataLoader(Clips(bank, label[:N_TRAIN], True), BATCH, shuffle=True, drop_last=True, pin_memory=CUDA,
                       num_workers=N_WORKERS, persistent_workers=True, prefetch_factor=2)
    held = Clips(bank, label[N_TRAIN:], False)
    val_x = torch.stack([held[i][0] for i in range(len(held))]).to(DEVICE)
    val_y = torch.from_numpy(label[N_TRAIN:]).to(DEVICE)

    front = LogMel().to(DEVICE)
    with torch.no_grad():
        val_spec = front(val_x).contiguous(memory_format=torch.channels_last)
    net = network().to(DEVICE, memory_format=torch.channels_last)
    ema = Average(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.02, fused=CUDA)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=EPOCHS * len(train))
    amp = torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA)

    for epoch in range(EPOCHS):
        total = torch.zeros((), device=DEVICE)
        for pcm, y in train:
            pcm, y = pcm.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
            spec = front(pcm).contiguous(memory_format=torch.channels_last)
            with amp:
                loss = F.cross_entropy(net(spec).float(), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            ema.update()
            total += loss.detach()
        ema.sync_buffers(net)
        with torch.no_grad(), amp:
            hits = torch.stack([(ema.model(a).argmax(1) == b).sum()
                                for a, b in zip(val_spec.split(64), val_y.split(64))]).sum()
        print(f"epoch {epoch} loss {total.item() / len(train):.4f} val acc {hits.item() / N_VAL:.4f}", flush=True)


if __name__ == "__main__":
    main()
    if CUDA:
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - TIC))
