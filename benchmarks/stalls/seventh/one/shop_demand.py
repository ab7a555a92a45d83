"""Tomorrow's demand in many shops: windows of each shop's table of days, a transformer, quantiles, and an end when the loss gets no better."""
import argparse
import time

import numpy as np
import pandas as pd
import torch
import torch.nn as nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = ["units", "price", "promotion", "holiday", "rain", "warmth", "weekday", "month"]
QUANTILES = (0.1, 0.5, 0.9)


def tables(shops, days):
    rng = np.random.default_rng(0)
    dates = pd.date_range("2021-01-01", periods=days, freq="D")
    found = {}
    for shop in range(shops):
        values = rng.standard_normal((days, len(COLUMNS))).astype(np.float32)
        values[:, 0] = np.exp(0.5 * np.sin(np.arange(days) / 58) + 0.2 * values[:, 2] + 0.1 * values[:, 0])
        found[shop] = pd.DataFrame(values, index=dates, columns=COLUMNS)
    return found


class Windows:
    def __init__(self, frames, past, future, batch):
        self.frames, self.past, self.future, self.batch = frames, past, future, batch
        self.days, self.rng = len(frames[0]), np.random.default_rng(1)

    def places(self):
        shops = self.rng.integers(0, len(self.frames), self.batch)
        return shops, self.rng.integers(0, self.days - self.past - self.future + 1, self.batch)

    def draw(self):
        rows = []
        for shop, first in zip(*self.places()):
            window = self.frames[int(shop)][COLUMNS].iloc[first : first + self.past + self.future]
            rows.append(window.to_numpy(np.float32))
        rows = torch.tensor(np.stack(rows)).to(DEVICE)
        return rows[:, : self.past], rows[:, self.past :, 0]


class WindowsOnDevice(Windows):
    def __init__(self, frames, past, future, batch):
        super().__init__(frames, past, future, batch)
        self.all = torch.tensor(np.stack([frame[COLUMNS].to_numpy(np.float32) for frame in frames.values()])).to(DEVICE)
        self.offsets = torch.arange(past + future, device=DEVICE)

    def draw(self):
        shops, firsts = (torch.from_numpy(part) for part in self.places())
        if DEVICE == "cuda":
            shops, firsts = (part.pin_memory().to(DEVICE, non_blocking=True) for part in (shops, firsts))
        rows = self.all[shops[:, None], firsts[:, None] + self.offsets]
        return rows[:, : self.past], rows[:, self.past :, 0]


class Demand(nn.Module):
    def __init__(self, past, future, wide, deep):
        super().__init__()
        self.enter, self.places = nn.Linear(len(COLUMNS), wide), nn.Parameter(torch.zeros(past, wide))
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 64), 4 * wide, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, deep, nn.LayerNorm(wide), enable_nested_tensor=False)
        self.head = nn.Linear(wide, future * len(QUANTILES))

    def forward(self, past):
        return self.head(self.body(self.enter(past) + self.places)[:, -1]).unflatten(1, (-1, len(QUANTILES)))


def pinball(said, wanted, quantiles):
    over = wanted[..., None] - said
    return torch.maximum(quantiles * over, (quantiles - 1) * over).mean()


class Patience:
    """Stops when the mean loss of a while is not below the best by so much, many times in a row."""

    def __init__(self, bear):
        self.best, self.bear, self.left, self.mean = float("inf"), bear, bear, None

    def over(self, loss):
        self.mean = loss if self.mean is None else 0.98 * self.mean + 0.02 * loss
        if self.mean < self.best - 1e-4:
            self.best, self.left = self.mean, self.bear
        else:
            self.left -= 1
        return self.left == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=190)
    options = parser.parse_args()
    shops, days, past, wide, deep, batch = (6, 90, 28, 32, 2, 4) if options.tiny else (500, 1461, 256, 512, 6, 256)
    torch.manual_seed(0)
    start = time.perf_counter()
    windows = (WindowsOnDevice if options.fixed else Windows)(tables(shops, days), past, 28, batch)
    model = Demand(past, 28, wide, deep).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    quantiles = torch.tensor(QUANTILES, device=DEVICE)
    patience, losses = Patience(20_000), []
    for turn in range(options.turns):
        past_days, wanted = windows.draw()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            said = model(past_days)
        loss = pinball(said.float(), wanted, quantiles)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if not options.fixed or turn % 50 == 49:
            if any(patience.over(one) for one in torch.stack(losses).tolist()):
                break
            losses.clear()
    print(f"best mean loss {patience.best:.4f} after {turn + 1}")
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
