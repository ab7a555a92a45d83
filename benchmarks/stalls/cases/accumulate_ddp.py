"""torchrun: four micro-batches under DDP without `no_sync`: the gradients travel four times, and a large vocabulary's are large."""
import contextlib

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, TextClassifier, run, size

VOCAB, MICRO = size(200000, 64), 4


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = TextClassifier(vocab=VOCAB, width=768, layers=3, heads=12)
    model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    y = torch.randint(0, 20, (size(32, 2),), device="cuda")
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for micro in range(MICRO):
            x = torch.randint(0, VOCAB, (size(32, 2), size(256, 8)), device="cuda")
            with model.no_sync() if fixed and micro < MICRO - 1 else contextlib.nullcontext():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x), y) / MICRO
                loss.backward()  # STALL: exposed_collective
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
