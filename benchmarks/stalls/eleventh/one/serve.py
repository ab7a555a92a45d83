"""Scoring server: returns the log-likelihood of each submitted text under a
small decoder-only language model. Requests of different lengths arrive in a
queue; the worker drains up to MAX_BATCH of them at a time."""
import collections
import os
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

WALL = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
CUDA = torch.cuda.is_available()
device = torch.device("cuda" if CUDA else "cpu")
dtype = torch.bfloat16 if CUDA else torch.float32

VOCAB = 512 if SMALL else 8192
DIM, HEADS, LAYERS = (64, 4, 2) if SMALL else (512, 8, 8)
MAX_LEN = 64 if SMALL else 384
MAX_BATCH = 8 if SMALL else 64
N_REQUESTS = 2400 if SMALL else 58_000
REPORT_EVERY = 60 if SMALL else 150

Request = collections.namedtuple("Request", "rid tokens arrived")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, DIM))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(MAX_LEN, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tok.weight)


class RequestSource:
    """Stands in for the network: always has a backlog."""

    def __init__(self, n, seed=0):
        self.rng = np.random.default_rng(seed)
        self.left, self.next_id = n, 0
        self.pool = self.rng.integers(1, VOCAB, 1 << 20)

    def drain(self, k):
        k = min(k, self.left)
        self.left -= k
        lens = self.rng.integers(MAX_LEN // 3, MAX_LEN + 1, k)
        offs = self.rng.integers(0, len(self.pool) - MAX_LEN, k)
        now = time.perf_counter()
        out = [Request(self.next_id + i, self.pool[o:o + n], now) for i, (o, n) in enumerate(zip(offs, lens))]
        self.next_id += k
        return out


class Worker:
    def __init__(self):
        torch.manual_seed(0)
        with device:
            self.model = LM().to(dtype).eval()
        self.latency = collections.deque(maxlen=4096)
        self.done = 0

    def collate(self, requests):
        longest = max(len(r.tokens) for r in requests)
        width = min(MAX_LEN, -(-longest // 64) * 64)
        ids = np.zeros((len(requests), width), dtype=np.int64)
        for row, r in zip(ids, requests):
            row[:len(r.tokens)] = r.tokens
        lens = np.array([len(r.tokens) for r in requests])
        return torch.from_numpy(ids).to(device), torch.from_numpy(lens).to(device)

    @torch.inference_mode()
    def score(self, ids, lens):
        logits = self.model(ids)[:, :-1].float()
        target = ids[:, 1:]
        token_ll = logits.gather(2, target[..., None]).squeeze(2) - logits.logsumexp(dim=2)
        mask = torch.arange(1, ids.shape[1], device=device) < lens[:, None]
        return (token_ll * mask).sum(1) / (lens - 1).clamp_min(1)

    def handle(self, requests):
        ids, lens = self.collate(requests)
        scores = self.score(ids, lens).cpu().numpy()
        now = time.perf_counter()
        replies = {}
        for r, s in zip(requests, scores):
            replies[r.rid] = float(s)
            self.latency.append(now - r.arrived)
        self.done += len(requests)
        if not FIXED:
            torch.cuda.empty_cache()  # FAULT
        return replies


def main():
    worker = Worker()
    warm = RequestSource(MAX_BATCH * 3, seed=123)
    while requests := warm.drain(MAX_BATCH):
        worker.handle(requests)
    worker.latency.clear()
    worker.done = 0

    source, batches, checksum = RequestSource(N_REQUESTS), 0, 0.0
    t_window = time.perf_counter()
    while requests := source.drain(MAX_BATCH):
        checksum += sum(worker.handle(requests).values())
        batches += 1
        if batches % REPORT_EVERY == 0:
            dt, t_window = time.perf_counter() - t_window, time.perf_counter()
            p50, p95 = np.percentile(worker.latency, [50, 95]) * 1e3
            print(f"{worker.done:6d} served  {MAX_BATCH * REPORT_EVERY / dt:8.0f} req/s  "
                  f"p50 {p50:.1f} ms  p95 {p95:.1f} ms", flush=True)
    print(f"mean score {checksum / worker.done:.4f}")


if __name__ == "__main__":
    main()
    if CUDA:
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - WALL))
