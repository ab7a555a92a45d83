"""Decoder-only language model on a synthetic Markov corpus (bf16 autocast)."""
import csv
import math
import os
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

t_start = time.perf_counter()
SMALL = os.environ.get("BLIND_SMALL") == "1"
CUDA = torch.cuda.is_available()
device = torch.device("cuda" if CUDA else "cpu")
torch.set_float32_matmul_precision("high")

vocab = 256 if SMALL else 16384
dim, heads, depth = (64, 4, 2) if SMALL else (1024, 16, 12)
block = 64 if SMALL else 1024
batch = 4 if SMALL else 16
steps = 80 if SMALL else 220
warmup = steps // 10
eval_every = steps // 4
peak_lr = 6e-4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, heads, c // heads).transpose(1, 2) for z in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.ln = nn.LayerNorm(dim)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for b in self.blocks:
            x = b(x)
        logits = F.linear(self.ln(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, vocab), targets.reshape(-1))


def make_corpus(n, seed):
    """Every symbol is followed by one of four; which one is random."""
    g = torch.Generator(device=device).manual_seed(seed)
    lanes = 4096 if not SMALL else 64
    succ = torch.randint(vocab, (vocab, 4), generator=torch.Generator(device=device).manual_seed(0), device=device)
    cur = torch.randint(vocab, (lanes,), generator=g, device=device)
    cols = []
    for _ in range(n // lanes):
        cur = succ[cur, torch.randint(4, (lanes,), generator=g, device=device)]
        cols.append(cur)
    return torch.stack(cols, dim=1).flatten()


def get_batch(data):
    start = torch.randint(len(data) - block - 1, (batch, 1), device=device)
    chunk = data[start + torch.arange(block + 1, device=device)]
    return chunk[:, :-1], chunk[:, 1:]


def lr_at(step):
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    return 0.1 * peak_lr + 0.45 * peak_lr * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.no_grad()
def estimate(model, data, amp, iters=4):
    model.eval()
    losses = []
    for _ in range(iters):
        with amp:
            losses.append(model(*get_batch(data)).item())
    model.train()
    return sum(losses) / len(losses)


def main():
    torch.manual_seed(1337)
    train_data, val_data = make_corpus(4_000_000 if not SMALL else 40_000, 1), make_corpus(
        800_000 if not SMALL else 16_000, 2)
    with device:
        model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                            lr=peak_lr, betas=(0.9, 0.95), fused=CUDA)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=CUDA)
    log_file = tempfile.NamedTemporaryFile("w", suffix=".csv", delete=True)
    log = csv.writer(log_file)
    log.writerow(["step", "lr", "loss"])

    smooth = None
    for step in range(steps):
        lr = lr_at(step)
        for group in opt.param_groups:
            group["lr"] = lr
        x, y = get_batch(train_data)
        with amp:
            loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        value = loss.item()
        smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
        log.writerow([step, f"{lr:.3e}", f"{value:.4f}"])
        if not math.isfinite(value):
            raise RuntimeError("loss diverged")
        if step % 20 == 0:
            print(f"step {step} loss {smooth:.3f} lr {lr:.2e}", flush=True)
        if (step + 1) % eval_every == 0:
            print(f"  val loss {estimate(model, val_data, amp):.3f}", flush=True)
    log_file.close()


if __name__ == "__main__":
    main()
    if CUDA:
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - t_start))
