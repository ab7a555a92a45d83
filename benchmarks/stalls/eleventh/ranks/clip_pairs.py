"""Image/text contrastive training: the in-batch negatives come from both ranks; pairs of one and the
same product (sku) are not counted as negatives of each other."""
import os
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
N_SAMPLES, BATCH = (64, 16) if SMALL else (1024 * 60, 1024)
WIDTH, DEPTH, PATCHES, WORDS = (32, 1, 4, 8) if SMALL else (384, 3, 16, 16)
EPOCHS, VAL_BATCHES = (2, 1) if SMALL else (14, 4)
VOCAB, PATCH_DIM, N_SKUS = 4000, 192, 20000


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(), grad.shape[1])
        dist.reduce_scatter_tensor(out, grad)
        return out


class Tower(nn.Module):
    def __init__(self, stem, tokens):
        super().__init__()
        self.stem = stem
        self.pos = nn.Parameter(torch.randn(tokens, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True,
                                           activation="gelu")
        self.body = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x):
        h = self.body(self.stem(x) + self.pos)
        return F.normalize(self.out(h.mean(1)).float(), dim=-1)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Tower(nn.Linear(PATCH_DIM, WIDTH), PATCHES)
        self.text = Tower(nn.Embedding(VOCAB, WIDTH), WORDS)
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, img, txt):
        return self.image(img), self.text(txt), self.scale.exp()


class Catalogue:
    """Pictures and captions lie on the device; the product records are python objects, as the crawler left them."""

    def __init__(self, rank, dev):
        g = torch.Generator(device=dev).manual_seed(rank)
        self.images = torch.randn(N_SAMPLES, PATCHES, PATCH_DIM, device=dev, generator=g, dtype=torch.bfloat16)
        self.texts = torch.randint(VOCAB, (N_SAMPLES, WORDS), device=dev, generator=g)
        rng = np.random.default_rng(rank)
        self.sku = rng.integers(0, N_SKUS, N_SAMPLES)
        self.sku_dev = torch.from_numpy(self.sku).to(dev)
        self.records = [{"sku": f"SKU-{s:07d}", "shop": f"shop{s % 37}", "weight": s * 0.25, "n": int(s)}
                        for s in self.sku.tolist()]

    def batch(self, i):
        return slice(i * BATCH, (i + 1) * BATCH)


def same_product(data, sl, dev):
    world = dist.get_world_size()
    if FIXED:
        ids = data.sku_dev.new_empty(world * BATCH)
        dist.all_gather_into_tensor(ids, data.sku_dev[sl])
    else:
        parts = [None] * world
        dist.all_gather_object(parts, data.records[sl])  # FAULT
        ids = torch.tensor([r["n"] for part in parts for r in part], device=dev)
    return ids


def contrastive(img, txt, scale, ids, rank):
    all_img, all_txt = GatherRows.apply(img), GatherRows.apply(txt)
    target = torch.arange(BATCH, device=img.device) + rank * BATCH
    twins = ids[target, None] == ids[None, :]
    twins.scatter_(1, target[:, None], False)
    li = (scale * img @ all_txt.T).masked_fill(twins, -1e4)
    lt = (scale * txt @ all_img.T).masked_fill(twins, -1e4)
    loss = (F.cross_entropy(li, target) + F.cross_entropy(lt, target)) / 2
    return loss, (li.argmax(1) == target).float().mean()


def run(dev, local):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    with torch.device(dev):
        model = Clip()
    ddp = DDP(model, device_ids=[local] if dev.type == "cuda" else None, gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(ddp.parameters(), lr=5e-4, weight_decay=0.2, fused=dev.type == "cuda")
    data = Catalogue(rank, dev)
    n = N_SAMPLES // BATCH
    order = np.random.default_rng(3)
    for epoch in range(EPOCHS):
        meter = torch.zeros(2, device=dev)
        for i in order.permutation(n - VAL_BATCHES):
            sl = data.batch(int(i))
            with torch.autocast(dev.type, torch.bfloat16):
                img, txt, scale = ddp(data.images[sl], data.texts[sl])
            loss, hit = contrastive(img, txt, scale, same_product(data, sl, dev), rank)
            loss.backward()
            opt.step()
            opt.zero_grad()
            meter += torch.stack([loss.detach(), hit])
        meter /= n - VAL_BATCHES
        with torch.no_grad(), torch.autocast(dev.type, torch.bfloat16):
            val = torch.zeros((), device=dev)
            for i in range(n - VAL_BATCHES, n):
                a, b, _ = model(data.images[data.batch(i)], data.texts[data.batch(i)])
                val += ((a @ b.T).argmax(1) == torch.arange(BATCH, device=dev)).float().mean() / VAL_BATCHES
        report = torch.cat([meter, val[None]]) / world
        dist.all_reduce(report)
        if rank == 0:
            print("epoch %d loss %.3f acc %.3f val %.3f" % (epoch, *report.tolist()), flush=True)
            if epoch == EPOCHS - 1:
                torch.save(model.state_dict(), os.path.join(tempfile.mkdtemp(), "clip.pt"))


if __name__ == "__main__":
    use_cuda = torch.cuda.is_available()
    lr_ = int(os.environ["LOCAL_RANK"])
    dev = torch.device("cuda", lr_) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(dev)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    t0 = time.perf_counter()
    run(dev, lr_)
    if use_cuda:
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print("RUN_SECONDS %.3f" % (time.perf_counter() - t0), flush=True)
    dist.barrier()
    dist.destroy_process_group()
