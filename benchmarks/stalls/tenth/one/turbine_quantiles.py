"""Sensors of gas turbines are foretold by a transformer; a thread keeps an eye on how large its errors usually are, quantile by quantile."""
import argparse
import queue
import threading
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


class Quantile:
    """P²: five markers tell one quantile of a stream, and nothing of the stream is kept."""

    def __init__(self, share):
        self.heights, self.places = [], [0, 1, 2, 3, 4]
        self.wished, self.growth = [0, 2 * share, 4 * share, 2 + 2 * share, 4], [0, share / 2, share, (1 + share) / 2, 1]

    def add(self, value):
        heights, places = self.heights, self.places
        if len(heights) < 5:
            heights.append(value)
            heights.sort()
            return
        heights[0], heights[4] = min(heights[0], value), max(heights[4], value)
        cell = next((i for i in range(1, 5) if value < heights[i]), 4)
        for i in range(cell, 5):
            places[i] += 1
        for i in range(5):
            self.wished[i] += self.growth[i]
        for i in (1, 2, 3):
            away = self.wished[i] - places[i]
            if (away >= 1 and places[i + 1] - places[i] > 1) or (away <= -1 and places[i - 1] - places[i] < -1):
                self.move(i, 1 if away > 0 else -1)

    def move(self, i, way):
        heights, places = self.heights, self.places
        low, high = places[i] - places[i - 1], places[i + 1] - places[i]
        bent = (low + way) * (heights[i + 1] - heights[i]) / high + (high - way) * (heights[i] - heights[i - 1]) / low
        bent = heights[i] + way * bent / (low + high)
        if not heights[i - 1] < bent < heights[i + 1]:
            bent = heights[i] + way * (heights[i + way] - heights[i]) / (places[i + way] - places[i])
        heights[i] = bent
        places[i] += way

    def value(self):
        return self.heights[2]


class Watch(threading.Thread):
    """Takes the errors of a step if it is free; what comes while it is not is left out."""

    def __init__(self):
        super().__init__(daemon=True)
        self.given, self.quantiles, self.seen = queue.Queue(maxsize=2), [Quantile(share) for share in SHARES], 0

    def offer(self, errors):
        if self.given.full():
            return
        home = torch.empty(errors.shape, pin_memory=DEVICE == "cuda").copy_(errors, non_blocking=True)
        ready = torch.cuda.Event() if DEVICE == "cuda" else None
        if ready:
            ready.record()
        self.given.put((home, ready))

    def run(self):
        while (item := self.given.get()) is not None:
            home, ready = item
            if ready:
                ready.synchronize()
            self.add(home)

    def add(self, home):
        for error in home.tolist():
            for quantile in self.quantiles:
                quantile.add(error)  # STALL: host_work
        self.seen += len(home)

    def values(self):
        return [quantile.value() for quantile in self.quantiles]


class WatchByHistogram(Watch):
    def __init__(self):
        super().__init__()
        self.edges = np.linspace(0, 8, 4001)
        self.counts = np.zeros(len(self.edges) + 1, np.int64)

    def add(self, home):
        self.counts += np.bincount(np.searchsorted(self.edges, home.numpy()), minlength=len(self.counts))
        self.seen += len(home)

    def values(self):
        below = self.counts.cumsum() / self.counts.sum()
        return [float(self.edges[min(below.searchsorted(share), len(self.edges) - 1)]) for share in SHARES]


class Forecast(nn.Module):
    def __init__(self, sensors, wide, deep):
        super().__init__()
        self.enter, self.leave = nn.Linear(sensors, wide), nn.Linear(wide, sensors)
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 64), 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, deep, enable_nested_tensor=False)

    def forward(self, x):
        return self.leave(self.body(self.enter(x)))


def recordings(count, batch, length, sensors):
    """Waves of each turbine's own, with noise: a window and the same window one moment later."""
    chance = torch.Generator(DEVICE).manual_seed(0)
    moments = torch.arange(length + 1, device=DEVICE) * 0.3
    for _ in range(count):
        pace, begin = torch.rand(2, batch, 1, sensors, device=DEVICE, generator=chance)
        waves = (moments[:, None] * (0.5 + pace) + 6.28 * begin).sin()
        waves += 0.2 * torch.randn(waves.shape, device=DEVICE, generator=chance)
        yield waves[:, :-1], waves[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--steps", type=int, default=650)
    options = parser.parse_args()
    batch, length, sensors, wide, deep, steps = (4, 16, 8, 32, 2, 6) if options.tiny else (112, 128, 64, 512, 8, options.steps)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Forecast(sensors, wide, deep).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    windows = list(recordings(4, batch, length, sensors))
    watch = WatchByHistogram() if options.fixed else Watch()
    watch.start()
    for step in range(steps):
        x, true = windows[step % 4]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            said = model(x).float()  # STALL: launch_bound
        errors = (said - true).abs()
        loss = F.smooth_l1_loss(said, true)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.offer(errors.detach()[:, -8:].mean(2).flatten())
    watch.given.put(None)
    watch.join()
    print(f"{watch.seen} errors, " + " ".join(f"{share}: {value:.3f}" for share, value in zip(SHARES, watch.values())))
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
