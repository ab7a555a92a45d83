"""Train a small diffusion transformer (DiT) on synthetic latents. DDP, bf16, EMA, sharded validation."""
import os
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
CFG = dict(dim=64, heads=4, depth=1, tokens=16, chan=8, batch=4, steps=4, epochs=2, val=2) if SMALL else \
    dict(dim=1024, heads=16, depth=10, tokens=256, chan=32, batch=56, steps=60, epochs=4, val=3)


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.n2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.ada = nn.Linear(dim, 4 * dim)

    def forward(self, x, c):
        s1, g1, s2, g2 = self.ada(F.silu(c)).chunk(4, -1)
        b, t, d = x.shape
        q, k, v = self.qkv(modulate(self.n1(x), s1, g1)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(modulate(self.n2(x), s2, g2)), approximate="tanh"))


class DiT(nn.Module):
    def __init__(self, dim, heads, depth, tokens, chan, **_):
        super().__init__()
        self.inp, self.outp = nn.Linear(chan, dim), nn.Linear(dim, chan)
        self.pos = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, t):
        c = self.time(t[:, None])
        h = self.inp(x) + self.pos
        for b in self.blocks:
            h = b(h, c)
        return self.outp(self.norm(h))


def flow_loss(model, x, dev):
    noise = torch.randn_like(x)
    t = torch.rand(x.shape[0], device=dev)
    mix = t[:, None, None] * x + (1 - t[:, None, None]) * noise
    with torch.autocast(dev.type, torch.bfloat16, enabled=dev.type == "cuda"):
        pred = model(mix, t)
    return F.mse_loss(pred.float(), x - noise)


def latents(n, dev, gen):
    return torch.randn(n, CFG["batch"], CFG["tokens"], CFG["chan"], generator=gen).pin_memory() if dev.type == "cuda" \
        else torch.randn(n, CFG["batch"], CFG["tokens"], CFG["chan"], generator=gen)


def main():
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    dev = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
        torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("nccl" if cuda else "gloo", device_id=dev if cuda else None)
    t0 = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    with dev:
        net = DiT(**CFG)
        ema = DiT(**CFG).requires_grad_(False)
    ema.load_state_dict(net.state_dict())
    ddp = DDP(net, device_ids=[local] if cuda else None, gradient_as_bucket_view=True, static_graph=True)
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=cuda)
    weights, averaged = list(net.parameters()), list(ema.parameters())
    gen = torch.Generator().manual_seed(50 + rank)
    train, valid = latents(16, dev, gen), latents(CFG["val"], dev, gen)
    torch.manual_seed(1000 + rank)
    writer = None

    for epoch in range(CFG["epochs"]):
        mean = torch.zeros((), device=dev)
        for step in range(CFG["steps"]):
            x = train[step % 16].to(dev, non_blocking=True)
            loss = flow_loss(ddp, x, dev)
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            if step % 10 == 9:
                with torch.no_grad():
                    torch._foreach_lerp_(averaged, weights, 0.01)
            mean += loss.detach()
            if step % 30 == 29 and rank == 0:
                print(f"epoch {epoch} step {step + 1} loss {loss.item():.4f}", flush=True)
        with torch.no_grad():
            val = sum(flow_loss(ema, v.to(dev, non_blocking=True), dev) for v in valid) / len(valid)
        pair = torch.stack([mean / CFG["steps"], val])
        dist.all_reduce(pair)
        if rank == 0:
            a, b = (pair / world).tolist()
            print(f"epoch {epoch} train {a:.4f} ema-val {b:.4f}", flush=True)
            if epoch == CFG["epochs"] // 2:
                state = [p.detach().to("cpu", torch.bfloat16) for p in averaged]
                writer = threading.Thread(target=torch.save, args=(state, os.path.join(tempfile.mkdtemp(), "ema.pt")))
                writer.start()
        dist.barrier(device_ids=[local] if cuda else None)
    if writer is not None:
        writer.join()
    if cuda:
        torch.cuda.synchronize()
    if rank == 0:
        print("RUN_SECONDS %.3f" % (time.perf_counter() - t0), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
