"""A guard against infinities between forward and backward pass. It waits for the GPU, which is busy until then and after."""

import torch
import torch.nn.functional as F

from models import STEPS, TextClassifier, run, size


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = TextClassifier(vocab=size(20000, 50), width=1024, layers=6, heads=16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
    x = torch.randint(0, size(20000, 50), (size(48, 2), size(384, 8)), device="cuda")
    y = torch.randint(0, 20, x.shape[:1], device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
            loss = F.cross_entropy(out, y)
        if not fixed and torch.any(torch.isinf(out)):  # STALL: host_sync
            raise FloatingPointError("infinite output")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
