"""Moths by their wings, under DDP: after each step the ranks meet, tell each other what they saw as Python objects, and the loss is read."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.nn.parallel import DistributedDataParallel


class Wings(nn.Module):
    def __init__(self, patch, edge, width, layers, kinds):
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, patch, patch), nn.Parameter(torch.zeros((edge // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, kinds)

    def forward(self, pictures):
        return self.head(self.body(self.patches(pictures).flatten(2).mT + self.places).mean(1))


def tell(step, loss, seen):
    """Everybody's news, and a line of it."""
    dist.barrier()
    news = [None] * dist.get_world_size()
    dist.all_gather_object(news, {"step": step, "loss": loss.item(), "seen": seen})
    if dist.get_rank() == 0:
        print(f"{step}: loss {sum(one['loss'] for one in news) / len(news):.4f} of {sum(one['seen'] for one in news)} pictures", flush=True)


def main(args):
    net = Wings(16, args.edge, args.width, args.layers, args.kinds).to(DEVICE)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=CUDA)
    chance = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    pictures = torch.randint(0, 256, (4 * args.batch, 3, args.edge, args.edge), dtype=torch.uint8, device=DEVICE, generator=chance)
    kinds = torch.randint(0, args.kinds, (len(pictures),), device=DEVICE, generator=chance)
    for step in range(1, args.steps + 1):
        rows = torch.randint(0, len(pictures), (args.batch,), device=DEVICE, generator=chance)
        some = pictures[rows].float().sub(120).div(65)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
            said = model(some)
        loss = F.cross_entropy(said.float(), kinds[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not args.fixed or step % 20 == 0:
            tell(step, loss.detach(), step * args.batch)


if __name__ == "__main__":
    run(main, steps=60, batch=256, edge=224, width=1024, layers=10, kinds=300)
