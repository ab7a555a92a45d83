"""Dense beta-VAE on 32x32 colour patches kept on the device; resumable run."""
import argparse
import os
import shutil
import sys
import tempfile
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F

START = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--batch", type=int, default=64 if SMALL else 8192)
    p.add_argument("--hidden", type=int, default=384 if SMALL else 4096)
    p.add_argument("--latent", type=int, default=32 if SMALL else 256)
    p.add_argument("--steps", type=int, default=60 if SMALL else 1450)
    p.add_argument("--save-every", type=int, default=14 if SMALL else 140)
    p.add_argument("--eval-every", type=int, default=20 if SMALL else 200)
    p.add_argument("--train-size", type=int, default=512 if SMALL else 65536)
    return p.parse_args()


class VAE(nn.Module):
    def __init__(self, hidden, latent, dim=3072):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(),
                                 nn.Linear(hidden, hidden // 2), nn.GELU())
        self.mu = nn.Linear(hidden // 2, latent)
        self.logvar = nn.Linear(hidden // 2, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden // 2), nn.GELU(),
                                 nn.Linear(hidden // 2, hidden), nn.GELU(),
                                 nn.Linear(hidden, dim))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h).float(), self.logvar(h).float().clamp(-8, 8)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def elbo_loss(out, x, beta):
    rec, mu, logvar = out
    mse = F.mse_loss(rec.float(), x)
    kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).mean()
    return mse + beta * kl


def patches(n, device, seed):
    g = torch.Generator(device=device).manual_seed(seed)
    basis = torch.randn(64, 3072, device=device, generator=g)
    code = torch.randn(n, 64, device=device, generator=g)
    x = torch.sigmoid(code @ basis * 0.2)
    return (x * 255).to(torch.uint8)


class Checkpointer:
    """Writes <dir>/last.pt atomically."""

    def __init__(self, directory, device):
        self.path = os.path.join(directory, "last.pt")
        self.cuda = device.type == "cuda"
        self.host, self.thread = {}, None

    def _write(self, state, event=None):
        if event is not None:
            event.synchronize()
        torch.save(state, self.path + ".tmp")
        os.replace(self.path + ".tmp", self.path)

    def _to_host(self, obj, key=()):
        if torch.is_tensor(obj):
            if key not in self.host:
                self.host[key] = torch.empty(obj.shape, dtype=obj.dtype, pin_memory=self.cuda)
            return self.host[key].copy_(obj.detach(), non_blocking=True)
        if isinstance(obj, dict):
            return {k: self._to_host(v, key + (k,)) for k, v in obj.items()}
        return obj

    def save(self, state):
        if FIXED:
            self.wait()
            snapshot, event = self._to_host(state), None
            if self.cuda:
                event = torch.cuda.Event()
                event.record()
            self.thread = threading.Thread(target=self._write, args=(snapshot, event))
            self.thread.start()
        else:
            torch.save(state, self.path + ".tmp")  # FAULT
            os.replace(self.path + ".tmp", self.path)

    def wait(self):
        if self.thread is not None:
            self.thread.join()


def main():
    args = get_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    train, val = patches(args.train_size, device, 1), patches(args.train_size // 8, device, 2)
    with device:
        model = VAE(args.hidden, args.latent)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    outdir = tempfile.mkdtemp(prefix="vae_")
    ckpt = Checkpointer(outdir, device)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    order = torch.randperm(len(train), device=device)
    pos, running = 0, torch.zeros((), device=device)
    for step in range(1, args.steps + 1):
        if pos + args.batch > len(train):
            order, pos = torch.randperm(len(train), device=device), 0
        x = train[order[pos:pos + args.batch]].float().div_(255)
        pos += args.batch
        with amp:
            out = model(x)
        loss = elbo_loss(out, x, beta=min(1.0, step / 200) * 0.01)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        running += loss.detach()
        if step % args.eval_every == 0:
            with torch.no_grad(), amp:
                xv = val[:args.batch].float().div_(255)
                vloss = elbo_loss(model(xv), xv, beta=0.01)
            print(f"step {step} train {running.item() / args.eval_every:.5f} val {vloss.item():.5f}", flush=True)
            running.zero_()
        if step % args.save_every == 0:
            ckpt.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()})
    ckpt.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    shutil.rmtree(outdir, ignore_errors=True)


main()
print("RUN_SECONDS %.3f" % (time.perf_counter() - START))
