"""Tensor-parallel GPT, Megatron style: heads and MLP columns split over the two GPUs, every rank sees all tokens."""
import math
import os
import shutil
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
D, H, L, V, T, B = (64, 4, 2, 300, 32, 2) if SMALL else (1024, 16, 6, 16000, 512, 8)
STEPS, SAVE_EVERY, VAL_EVERY, LOG_EVERY = (12, 5, 4, 4) if SMALL else (850, 180, 150, 50)
EPOCH = 4 if SMALL else 100


class ToParallel(torch.autograd.Function):      # identity forward, all-reduce backward
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class FromParallel(torch.autograd.Function):    # all-reduce forward, identity backward
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Block(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.h = H // world
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D // world, bias=False)
        self.out = nn.Linear(D // world, D, bias=False)
        self.fc1 = nn.Linear(D, 4 * D // world, bias=False)
        self.fc2 = nn.Linear(4 * D // world, D, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(ToParallel.apply(self.n1(x))).view(b, t, 3, self.h, D // H).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + FromParallel.apply(self.out(a))
        return x + FromParallel.apply(self.fc2(F.gelu(self.fc1(ToParallel.apply(self.n2(x))))))


class GPT(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(world) for _ in range(L))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return F.linear(self.norm(x), self.wte.weight)


class Checkpointer:
    """Rank 0 writes one file with the weights and Adam moments of both shards."""

    def __init__(self, model, opt, rank, dev):
        self.model, self.opt, self.rank, self.dev = model, opt, rank, dev
        self.dir = tempfile.mkdtemp(prefix="tpgpt") if rank == 0 else None
        self.writer, self.host = None, None

    def flat_state(self):
        s = self.opt.state
        parts = [[p.detach(), s[p]["exp_avg"], s[p]["exp_avg_sq"]] for p in self.model.parameters()]
        return torch.cat([t.reshape(-1) for row in parts for t in row])

    def finish(self):
        if self.writer is not None:
            self.writer.join()

    def save(self, step):
        flat = self.flat_state()
        if self.rank != 0:
            dist.send(flat, 0)
            return
        other = torch.empty_like(flat)
        dist.recv(other, 1)
        path = os.path.join(self.dir, "last.pt")
        if FIXED:
            self.finish()
            if self.host is None:
                self.host = [torch.empty(flat.shape, pin_memory=self.dev.type == "cuda") for _ in range(2)]
            for h, d in zip(self.host, (flat, other)):
                h.copy_(d, non_blocking=True)
            if self.dev.type == "cuda":
                torch.cuda.current_stream().synchronize()
            self.writer = threading.Thread(target=torch.save, args=({"step": step, "shards": self.host}, path))
            self.writer.start()
        else:
            torch.save({"step": step, "shards": [flat.cpu(), other.cpu()]}, path)  # FAULT


def main():
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    dev = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
        dist.init_process_group("nccl", device_id=dev)
    else:
        dist.init_process_group("gloo")
    t0 = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    with dev:
        model = GPT(world)
    torch.manual_seed(1 + rank)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".qkv." in name or ".fc1." in name or ".out." in name or ".fc2." in name:   # the split ones
                p.normal_(std=0.02 / (math.sqrt(2 * L) if ".out." in name or ".fc2." in name else 1))
        model.wte.weight.mul_(0.02)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=cuda)
    gen = torch.Generator(device=dev).manual_seed(7)        # the same tokens on both ranks
    tokens = torch.randint(V, (EPOCH, B, T + 1), device=dev, generator=gen)
    held_out = torch.randint(V, (4, B, T + 1), device=dev, generator=gen)
    ckpt = Checkpointer(model, opt, rank, dev)

    def loss_of(chunk):
        with torch.autocast(dev.type, torch.bfloat16):
            logits = model(chunk[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten())

    smooth = torch.zeros((), device=dev)
    for step in range(1, STEPS + 1):
        for g in opt.param_groups:
            g["lr"] = 3e-4 * min(step / 50, 0.5 * (1 + math.cos(math.pi * step / STEPS)) + 0.01)
        loss = loss_of(tokens[step % EPOCH])
        loss.backward()
        opt.step()
        opt.zero_grad()
        smooth.lerp_(loss.detach(), 0.02 if step > 1 else 1.0)
        if step % LOG_EVERY == 0 and rank == 0:
            print(f"step {step} loss {smooth.item():.4f} {step / (time.perf_counter() - t0):.1f} it/s", flush=True)
        if step % VAL_EVERY == 0:
            with torch.no_grad():
                val = torch.stack([loss_of(c) for c in held_out]).mean()
            if rank == 0:
                print(f"step {step} val {val.item():.4f}", flush=True)
        if step % SAVE_EVERY == 0:
            ckpt.save(step)
    ckpt.finish()
    if cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - t0
    if rank == 0:
        shutil.rmtree(ckpt.dir, ignore_errors=True)
        print("RUN_SECONDS %.3f" % took, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
