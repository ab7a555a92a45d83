"""`gc.collect()` at the end of every step, against a memory leak that is long gone."""
import gc

import torch
import torch.nn.functional as F

from models import STEPS, ViT, run, size


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = ViT(width=512, layers=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(size(192, 2), 3, size(224, 32), size(224, 32), device="cuda")
    y = torch.randint(0, 1000, x.shape[:1], device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not fixed:
            gc.collect()  # STALL: host_work
        tick()


if __name__ == "__main__":
    run(main)
