"""torchrun: local SGD. Each rank trains by itself and the weights are averaged every 40 steps: nothing to gain."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import TextClassifier, size

BATCH, LENGTH = size(96, 2), size(256, 8)


@torch.no_grad()
def average(model):
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = TextClassifier(width=1024, layers=6, heads=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(turns(240, 2)):
        tokens = torch.randint(0, 8192, (BATCH, LENGTH), device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens), tokens[:, 0] % 20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            average(model)
        tick()


if __name__ == "__main__":
    run(main)
