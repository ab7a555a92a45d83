#!/usr/bin/env python3
# Frame-wise acoustic model. Data parallel by hand: one flat gradient buffer, one all_reduce a step.
# Utterances are sorted by length and batched with their like, so that little is padded.
import os
import random
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
MELS, PHONES = 80, 120
DIM, HEADS, LAYERS = (64, 4, 1) if SMALL else (768, 12, 6)
UTTS, BATCH = (96, 4) if SMALL else (48 * 160, 48)
MIN_LEN, MAX_LEN = (32, 160) if SMALL else (160, 1600)
EPOCHS, VAL_EVERY = (2, 1) if SMALL else (6, 1)
VAL_BATCHES = 4 if SMALL else 12


class Corpus:
    """All frames in one long tensor on the device; an utterance is an offset and a length."""

    def __init__(self, dev):
        rng = np.random.default_rng(11)
        self.length = np.clip(rng.gamma(2.5, MAX_LEN / 6.5, UTTS), MIN_LEN, MAX_LEN).astype(np.int64)
        self.offset = np.concatenate([[0], np.cumsum(self.length)])
        g = torch.Generator(device=dev).manual_seed(12)
        total = int(self.offset[-1])
        self.frames = torch.randn(total, MELS, generator=g, device=dev, dtype=torch.bfloat16 if dev.type == "cuda" else None)
        self.phones = torch.randint(PHONES, (total,), generator=g, device=dev)
        self.dev = dev

    def batches(self):
        order = np.argsort(self.length, kind="stable")
        return [order[i:i + BATCH] for i in range(0, UTTS, BATCH)]

    def fetch(self, utts):
        width = int(-(-self.length[utts].max() // 16) * 16)
        start = torch.from_numpy(self.offset[utts])
        size = torch.from_numpy(self.length[utts])
        meta = torch.stack([start, size])
        if self.dev.type == "cuda":
            meta = meta.pin_memory().to(self.dev, non_blocking=True)
        start, size = meta[0][:, None], meta[1][:, None]
        t = torch.arange(width, device=self.dev)[None]
        index = (start + t).clamp(max=len(self.phones) - 1)
        x = self.frames[index] * (t < size)[..., None]
        y = self.phones[index][:, ::2].masked_fill(t[:, ::2] >= size, -100)
        return x, y


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.sub = nn.Conv1d(MELS, DIM, 3, stride=2, padding=1)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            self.layers.append(nn.ModuleDict(dict(
                n1=nn.LayerNorm(DIM), qkv=nn.Linear(DIM, 3 * DIM), o=nn.Linear(DIM, DIM),
                n2=nn.LayerNorm(DIM), a=nn.Linear(DIM, 4 * DIM), b=nn.Linear(4 * DIM, DIM))))
        self.final = nn.LayerNorm(DIM)
        self.cls = nn.Linear(DIM, PHONES)

    def forward(self, x):
        x = self.sub(x.transpose(1, 2)).transpose(1, 2)
        for m in self.layers:
            n, t, _ = x.shape
            q, k, v = m["qkv"](m["n1"](x)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            # batches are tight: the few padded frames may be attended to
            x = x + m["o"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, DIM))
            x = x + m["b"](F.silu(m["a"](m["n2"](x))))
        return self.cls(self.final(x))


def flatten_grads(params, dev):
    """Give every parameter a .grad that is a view of one buffer."""
    flat = torch.zeros(sum(p.numel() for p in params), device=dev)
    at = 0
    for p in params:
        p.grad = flat[at:at + p.numel()].view_as(p)
        at += p.numel()
    return flat


def main():
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    dev = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
        dist.init_process_group("nccl", device_id=dev)
    else:
        dist.init_process_group("gloo")
    begin = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(4)
    with dev:
        net = Encoder()
    params = list(net.parameters())
    flat = flatten_grads(params, dev)
    opt = torch.optim.AdamW(params, lr=4e-4, fused=cuda)
    corpus = Corpus(dev)

    batches = corpus.batches()
    held = batches[::len(batches) // VAL_BATCHES][:VAL_BATCHES]
    ids = {id(b) for b in held}
    batches = [b for b in batches if id(b) not in ids]
    steps = len(batches) // world
    if FIXED:
        mine = batches[rank::world]
    else:
        mine = batches[rank * steps:(rank + 1) * steps]  # FAULT
    mine = mine[:steps]

    def loss_of(utts):
        x, y = corpus.fetch(utts)
        with torch.autocast(dev.type, torch.bfloat16, enabled=cuda):
            out = net(x)
        return F.cross_entropy(out.float().flatten(0, 1), y.flatten())

    shuffle = random.Random(0)              # the same order of steps on both ranks
    for epoch in range(EPOCHS):
        tick = time.perf_counter()
        order = list(range(steps))
        shuffle.shuffle(order)
        seen = torch.zeros((), device=dev)
        for i in order:
            loss = loss_of(mine[i])
            loss.backward()
            dist.all_reduce(flat)
            flat.div_(world)
            torch.nn.utils.clip_grad_norm_(params, 5.0)
            opt.step()
            flat.zero_()
            seen += loss.detach() / steps
        if (epoch + 1) % VAL_EVERY == 0:
            with torch.no_grad():           # neighbours in length, so both ranks have about as much to do
                res = torch.stack([seen, sum(loss_of(u) for u in held[rank::world]) / len(held[rank::world])])
            dist.all_reduce(res)
            if rank == 0:
                tr, va = (res / world).tolist()
                print(f"epoch {epoch:2d} | train {tr:.4f} | val {va:.4f} | {time.perf_counter() - tick:.2f} s", flush=True)
    if rank == 0:
        torch.save({k: v.to(torch.bfloat16) for k, v in net.state_dict().items()},
                   os.path.join(tempfile.mkdtemp(), "am.pt"))
    if cuda:
        torch.cuda.synchronize()
    if rank == 0:
        print("RUN_SECONDS %.3f" % (time.perf_counter() - begin), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
