"""Two ranks that the script spawns itself, a GPU each; every fortieth step the first one evaluates, and all wait."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1])
CUDA = torch.cuda.is_available()


def evaluate(model: torch.nn.Module, batch: torch.Tensor) -> float:
    total = 0.0
    for _ in range(60):
        total += model(batch).pow(2).mean().item()
    return total


def train(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if CUDA else "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    width = 1024 if CUDA else 64
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(12)]).to(device)
    wrapped = DistributedDataParallel(model, device_ids=[rank] if CUDA else None)
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-5), torch.randn(256, width, device=device)
    for step in range(1, STEPS + 1):
        loss = wrapped(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0 and rank == 0:
            with torch.no_grad():
                evaluate(model, torch.cat([data] * 8))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(tempfile.mkdtemp(),), nprocs=2)
    print("all is done", flush=True)
