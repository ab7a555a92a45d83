"""Click-style binary classification on a wide numeric table: quantile
normalisation, then an MLP with batch norm; the whole table fits the device."""
import os
import sys
import time

import numpy as np
import torch
from torch import nn

clock0 = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_float32_matmul_precision("high")

ROWS = 20_000 if SMALL else 1_000_000
COLS = 16 if SMALL else 64
BATCH = 512 if SMALL else 8192
EPOCHS = 2 if SMALL else 14
WIDTH = 64 if SMALL else 1024
QUANTILES = 1001


def load_table(seed=0):
    """Skewed positive columns with very different scales, as read from disk."""
    rng = np.random.default_rng(seed)
    x = rng.random((ROWS, COLS), dtype=np.float32)
    x *= x
    x *= np.exp(rng.uniform(-3, 6, COLS)).astype(np.float32)
    w = rng.standard_normal(COLS).astype(np.float32) / x[:2000].std(axis=0)
    score = x @ w
    y = score + rng.standard_normal(ROWS, dtype=np.float32) * 0.5 > np.median(score)
    return x, y.astype(np.float32)


class QuantileNormaliser:
    """Maps every column to a standard normal through its empirical CDF."""

    def fit(self, x):
        sub = x[:: max(1, len(x) // 20_000)]
        self.ref = np.linspace(0, 1, QUANTILES)
        self.q = np.quantile(sub, self.ref, axis=0)
        return self

    @staticmethod
    def _to_normal(u):
        return torch.erfinv(u.clamp(1e-4, 1 - 1e-4).mul_(2).sub_(1)).mul_(2 ** 0.5)

    def transform(self, x):
        if FIXED:
            return self._transform_on_device(torch.from_numpy(x).to(DEVICE))
        u = np.empty_like(x)
        for j in range(x.shape[1]):
            u[:, j] = np.interp(x[:, j], self.q[:, j], self.ref)  # FAULT
        return self._to_normal(torch.from_numpy(u).to(DEVICE))

    def _transform_on_device(self, x):
        q = torch.from_numpy(np.ascontiguousarray(self.q.T, dtype=np.float32)).to(DEVICE)
        cols = x.t().contiguous()
        hi = torch.searchsorted(q, cols).clamp_(1, QUANTILES - 1)
        lo_v, hi_v = q.gather(1, hi - 1), q.gather(1, hi)
        frac = ((cols - lo_v) / (hi_v - lo_v).clamp_min(1e-12)).clamp_(0, 1)
        u = (hi - 1 + frac) / (QUANTILES - 1)
        return self._to_normal(u).t().contiguous()


def mlp(depth=5, dropout=0.05):
    layers, width = [], COLS
    for _ in range(depth):
        layers += [nn.Linear(width, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.SiLU(inplace=True),
                   nn.Dropout(dropout)]
        width = WIDTH
    return nn.Sequential(*layers, nn.Linear(width, 1))


@torch.no_grad()
def auc(net, x, y):
    net.eval()
    score = torch.cat([net(c).squeeze(1) for c in x.split(65536)])
    rank = score.argsort().argsort().float() + 1
    pos = y.sum()
    value = ((rank * y).double().sum() - pos.double() * (pos + 1) / 2) / (pos * (len(y) - pos))
    net.train()
    return value.item()


def fit(x, y):
    split = int(0.9 * len(x))
    xt, yt, xv, yv = x[:split], y[:split], x[split:], y[split:]
    net = mlp().to(DEVICE)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-4, fused=DEVICE.type == "cuda")
    iters = split // BATCH
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=EPOCHS * iters)
    lossf = nn.BCEWithLogitsLoss()
    best = 0.0
    for epoch in range(EPOCHS):
        perm = torch.randperm(split, device=DEVICE)
        ema = None
        for i in range(iters):
            idx = perm[i * BATCH:(i + 1) * BATCH]
            loss = lossf(net(xt[idx]).squeeze(1), yt[idx])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            ema = loss.detach() if ema is None else torch.lerp(ema, loss.detach(), 0.05)
        a = auc(net, xv, yv)
        best = max(best, a)
        print(f"epoch {epoch + 1:2d}/{EPOCHS} loss {ema.item():.4f} auc {a:.4f} best {best:.4f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    raw, target = load_table()
    table = QuantileNormaliser().fit(raw).transform(raw)
    print(f"table ready {tuple(table.shape)} mean {table.mean().item():.3f} std {table.std().item():.3f}")
    fit(table, torch.from_numpy(target).to(DEVICE))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - clock0))
