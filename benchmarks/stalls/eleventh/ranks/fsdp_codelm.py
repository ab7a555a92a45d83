"""Pre-train a small code language model with FSDP2 on two GPUs.

    torchrun --nproc-per-node 2 fsdp_codelm.py [--fixed]
"""
import os
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"


@dataclass
class Config:
    vocab: int = 256 if SMALL else 8192
    width: int = 64 if SMALL else 1024
    heads: int = 4 if SMALL else 16
    depth: int = 2 if SMALL else 12
    seq: int = 32 if SMALL else 512
    batch: int = 2 if SMALL else 6
    epochs: int = 2 if SMALL else 4
    steps: int = 4 if SMALL else 45
    val_steps: int = 2 if SMALL else 4
    lr: float = 3e-4


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.heads = c.heads
        self.q_proj = nn.Linear(c.width, c.width, bias=False)
        self.k_proj = nn.Linear(c.width, c.width, bias=False)
        self.v_proj = nn.Linear(c.width, c.width, bias=False)
        self.o_proj = nn.Linear(c.width, c.width, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.attn = Attention(c)
        self.up = nn.Linear(c.width, 4 * c.width, bias=False)
        self.down = nn.Linear(4 * c.width, c.width, bias=False)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CodeLM(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.tok = nn.Embedding(c.vocab, c.width)
        self.pos = nn.Embedding(c.seq, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x))


def shard(model, mesh, cuda):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else MixedPrecisionPolicy()
    if FIXED:
        units = [m for m in model.modules() if isinstance(m, Block)]
    else:
        units = [m for m in model.modules() if isinstance(m, nn.Linear)]  # FAULT
    for m in units:
        fully_shard(m, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def lm_loss(model, chunk):
    logits = model(chunk[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), chunk[:, 1:].flatten())


def main():
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    dev = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
        dist.init_process_group("nccl", device_id=dev)
    else:
        dist.init_process_group("gloo")
    t0 = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    c = Config()
    torch.manual_seed(0)
    with torch.device(dev):
        model = CodeLM(c)
    model = shard(model, init_device_mesh(dev.type, (world,)), cuda)
    opt = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 20))

    gen = torch.Generator().manual_seed(100 + rank)          # every rank has its own part of the corpus
    corpus = torch.randint(c.vocab, (c.steps + c.val_steps, c.batch, c.seq + 1), generator=gen).to(dev)
    train, val = corpus[:c.steps], corpus[c.steps:]

    for epoch in range(c.epochs):
        model.train()
        running = torch.zeros((), device=dev)
        for i in torch.randperm(c.steps, generator=gen).tolist():
            loss = lm_loss(model, train[i])
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            sched.step()
            running += loss.detach()
        model.eval()
        with torch.no_grad():
            vloss = torch.stack([lm_loss(model, v) for v in val]).mean()
        stats = torch.stack([running / c.steps, vloss])
        dist.all_reduce(stats)
        if rank == 0:
            tr, va = (stats / world).tolist()
            print(f"epoch {epoch} train {tr:.4f} val {va:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)

    out = tempfile.mkdtemp(prefix="codelm")
    torch.save({k: v.to_local() for k, v in model.state_dict().items()}, os.path.join(out, f"shard{rank}.pt"))
    if cuda:
        torch.cuda.synchronize()
    if rank == 0:
        print("RUN_SECONDS %.3f" % (time.perf_counter() - t0), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
