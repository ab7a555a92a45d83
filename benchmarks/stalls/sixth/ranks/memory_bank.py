"""Instance discrimination with a memory bank of all pictures' features, under DDP."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import DEVICE, run
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18, resnet50

NEGATIVES, TEMPERATURE, MOMENTUM = 4096, 0.07, 0.5


class InstanceDiscrimination(nn.Module):
    def __init__(self, encoder, pictures, features):
        super().__init__()
        self.encoder = encoder
        self.register_buffer("bank", F.normalize(torch.randn(pictures, features), dim=1))

    def forward(self, images, indices, negatives):
        features = F.normalize(self.encoder(images).float(), dim=1)
        positive = (features * self.bank[indices]).sum(1, keepdim=True)
        scores = torch.cat([positive, features @ self.bank[negatives].T], dim=1) / TEMPERATURE
        return features, F.cross_entropy(scores, torch.zeros_like(indices))

    @torch.no_grad()
    def remember(self, indices, features):
        self.bank[indices] = F.normalize(MOMENTUM * self.bank[indices] + (1 - MOMENTUM) * features, dim=1)


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def main(args):
    with DEVICE:
        encoder = (resnet18 if args.edge < 64 else resnet50)(num_classes=args.features)
        net = InstanceDiscrimination(encoder, args.pictures, args.features).to(memory_format=torch.channels_last)
    # Every rank remembers the features of all ranks, so the banks stay alike by themselves.
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=not args.fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    pool = torch.randint(0, 256, (4, args.batch, 3, args.edge, args.edge), dtype=torch.uint8, device=DEVICE, generator=generator)
    total = torch.zeros((), device=DEVICE)
    for step in range(args.steps):
        images = ((pool[step % 4].float() - 127.5) / 60).contiguous(memory_format=torch.channels_last)
        indices = torch.randint(0, args.pictures, (args.batch,), device=DEVICE, generator=generator)
        negatives = torch.randint(0, args.pictures, (NEGATIVES,), device=DEVICE, generator=generator)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            features, loss = model(images, indices, negatives)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.remember(gathered(indices), gathered(features.detach()))
        total += loss.detach()
    if dist.get_rank() == 0:
        print(f"mean loss {total.item() / args.steps:.4f}")


if __name__ == "__main__":
    run(main, steps=210, batch=80, edge=224, pictures=1_281_167, features=512)
