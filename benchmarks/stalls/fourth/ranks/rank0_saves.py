"""torchrun: rank 0 writes a checkpoint every 30 steps while the other waits at a barrier."""
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import TextClassifier, size

BATCH, LENGTH, EVERY = size(96, 2), size(256, 8), size(30, 2)


def on_host(value):
    """The same, its tensors on their way to pinned memory."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="cpu", pin_memory=DEVICE == "cuda").copy_(value, non_blocking=True)
    if isinstance(value, dict):
        return {key: on_host(part) for key, part in value.items()}
    return [on_host(part) for part in value] if isinstance(value, list) else value


class Saver:
    """Copies what is to be saved and goes on; a thread writes."""

    def __init__(self):
        self.thread = None

    def save(self, state, path):
        self.wait()
        copied = on_host(state)
        ready = torch.cuda.Event() if DEVICE == "cuda" else None
        if ready is not None:
            ready.record()
        self.thread = threading.Thread(target=self.write, args=(copied, ready, path))
        self.thread.start()

    def write(self, copied, ready, path):
        if ready is not None:
            ready.synchronize()
        part = path.with_suffix(".part")
        torch.save(copied, part)
        part.replace(path)

    def wait(self):
        if self.thread is not None:
            self.thread.join()


def main(tick, fixed=False):
    torch.manual_seed(0)
    rank = dist.get_rank()
    with torch.device(DEVICE):
        model = TextClassifier(width=640, layers=8, heads=10)
        tokens, labels = torch.randint(0, 8192, (8, BATCH, LENGTH)), torch.randint(0, 20, (8, BATCH))
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    saver = Saver()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.pt")
        for step in range(turns(270, 4)):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(tokens[step % 8]), labels[step % 8])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == EVERY - 1:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                if fixed:
                    if rank == 0:
                        saver.save(state, path)
                else:
                    if rank == 0:
                        torch.save(state, path)  # STALL: peer_late
                    dist.barrier()  # STALL: peer_late
            tick()
        saver.wait()
        dist.barrier()


if __name__ == "__main__":
    run(main)
