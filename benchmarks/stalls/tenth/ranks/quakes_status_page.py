"""Which ground motion is a quake, by a transformer under DDP; on the first rank a thread keeps a status page up to date for those who look in."""
import json
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run

KINDS, SERIES = 16, 24


class Page(threading.Thread):
    """Draws all series as SVG, smoothed, again and again, `pause` seconds after the last time."""

    def __init__(self, path, pause, moments=1500):
        super().__init__(daemon=True)
        self.path, self.pause, self.over, self.drawn = path, pause, threading.Event(), 0
        self.series = {f"station {number}": [((moment * (7 + number)) % 101) / 100 for moment in range(moments)] for number in range(SERIES)}

    def smoothed(self, series, share=0.95):
        out, mean = [], series[0]
        for value in series:  # STALL: host_work
            mean = share * mean + (1 - share) * value
            out.append(mean)
        return out

    def curve(self, name, series):
        points = " ".join(f"{x:.1f},{100 - 90 * y:.2f}" for x, y in enumerate(self.smoothed(series)))  # STALL: host_work
        return f'<figure><svg viewBox="0 0 {len(series)} 100"><polyline points="{points}"/></svg><figcaption>{name}</figcaption></figure>'

    def draw(self):
        body = "".join(self.curve(name, series) for name, series in self.series.items())
        latest = json.dumps({name: series[-1] for name, series in self.series.items()})
        self.path.write_text(f"<html><script>const latest = {latest}</script><body>{body}</body></html>")
        self.drawn += 1

    def run(self):
        while not self.over.wait(self.pause):
            self.draw()

    def end(self):
        self.over.set()
        self.join()
        self.draw()


class Quakes(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.enter = nn.Conv1d(3, args.width, 8, 8)
        layer = nn.TransformerEncoderLayer(args.width, max(1, args.width // 64), 4 * args.width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, KINDS)

    def forward(self, motion):
        return self.head(self.body(self.enter(motion).mT).mean(1))


def learn(args, rank):
    model = DistributedDataParallel(Quakes(args).to(DEVICE), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=CUDA)
    chance = torch.Generator(DEVICE).manual_seed(rank)
    motion = torch.randn(4, args.batch, 3, args.samples, device=DEVICE, generator=chance)
    kinds = torch.randint(0, KINDS, (4, args.batch), device=DEVICE, generator=chance)
    total = torch.zeros((), device=DEVICE)
    for step in range(args.steps):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
            said = model(motion[step % 4])  # STALL: launch_bound
        loss = F.cross_entropy(said.float(), kinds[step % 4])
        optimizer.zero_grad()
        loss.backward()  # STALL: peer_late
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / args.steps / dist.get_world_size()


def main(args):
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        page = Page(Path(folder) / "status.html", pause=20.0 if args.fixed else 0.05) if rank == 0 else None
        if page:
            page.start()
        loss = learn(args, rank)
        if page:
            page.end()
            print(f"mean loss {loss:.4f}, page drawn {page.drawn} times, {page.path.stat().st_size} bytes")


if __name__ == "__main__":
    run(main, steps=850, batch=96, samples=1024, width=512, layers=8)
