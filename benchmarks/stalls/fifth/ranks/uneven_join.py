"""torchrun: a ResNet under DDP; clinics sent unequal numbers of pictures, each rank has a clinic, and `Join` bears with it."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from setting import DEVICE, run, size, turns
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18, resnet50

BATCH, EDGE = size(128, 2), size(224, 32)


def share_of(rank, world, batches, even):
    """How many batches a rank has: its clinic's, or as many as the others."""
    if even:
        return batches
    return batches * 3 // 2 if rank == 0 else (batches * world - batches * 3 // 2) // (world - 1)


def main(variant):
    torch.backends.cudnn.benchmark = True
    mine = share_of(dist.get_rank(), dist.get_world_size(), turns(160, 4), variant == "fixed")
    net = (resnet18 if EDGE == 32 else resnet50)(num_classes=14).to(DEVICE, memory_format=torch.channels_last)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures = torch.randint(0, 256, (size(1024, 8), 3, EDGE, EDGE), dtype=torch.uint8, device=DEVICE)
    seen = torch.zeros((), device=DEVICE)
    with Join([model]):
        for _ in range(mine):
            x = pictures[torch.randint(0, len(pictures), (BATCH,), device=DEVICE)]
            x = (x.float() / 128 - 1).contiguous(memory_format=torch.channels_last)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                logits = model(x)
            loss = F.binary_cross_entropy_with_logits(logits.float(), torch.zeros_like(logits).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += BATCH
    dist.all_reduce(seen)
    if dist.get_rank() == 0:
        print(f"{int(seen.item())} pictures")


if __name__ == "__main__":
    run(main)
