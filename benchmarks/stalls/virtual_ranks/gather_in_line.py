"""torchrun: what each rank has seen is gathered from all before the next layer, though only the step's end needs it."""
import torch
import torch.distributed as dist
from script import DEVICE, run, turns

from models import encoder


def main(tick, fixed=False):
    with torch.device(DEVICE):
        first, second = encoder(1024, layers=4, heads=16), encoder(1024, layers=4, heads=16)
        x = torch.randn(64, 256, 1024)
        everyone = torch.empty(64 * 8 * dist.get_world_size(), 256, 1024, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-4)
    for step in range(turns(100, 2)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            hidden = first(x)
            shared = hidden.detach().bfloat16().repeat(8, 1, 1)
            if fixed:
                work = dist.all_gather_into_tensor(everyone, shared, async_op=True)
            else:
                dist.all_gather_into_tensor(everyone, shared)  # STALL: exposed_collective
            loss = second(hidden).float().square().mean()
        loss.backward()
        if fixed:
            work.wait()
        loss = everyone.float().mean()
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
