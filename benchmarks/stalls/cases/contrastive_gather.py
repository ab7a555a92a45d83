"""torchrun: a CLIP-like step that gathers all ranks' embeddings. The gather is small and needed at once: nothing to mend."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from models import STEPS, TextClassifier, ViT, run, size


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.image = ViT(width=512, layers=3, classes=width)
        self.text = TextClassifier(width=512, layers=3, classes=width)

    def forward(self, images, texts):
        return F.normalize(self.image(images).float(), dim=1), F.normalize(self.text(texts).float(), dim=1)


def gathered(mine):
    """All ranks' rows; gradients flow through this rank's own."""
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine.detach())
    everybody[dist.get_rank()] = mine
    return torch.cat(everybody)


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = Pair(size(512, 16))
    model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = size(128, 2)
    images = torch.randn(batch, 3, size(192, 32), size(192, 32), device="cuda")
    texts = torch.randint(0, 8192, (batch, size(128, 8)), device="cuda")
    own = dist.get_rank() * batch + torch.arange(batch, device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            seen, read = model(images, texts)
        loss = F.cross_entropy(20 * seen @ gathered(read).T, own) + F.cross_entropy(20 * read @ gathered(seen).T, own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
