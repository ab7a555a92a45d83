"""Speech batches come in buckets of four lengths, and whenever the length changes the allocator's cache is thrown away."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size


class Speech(nn.Module):
    def __init__(self, width):
        super().__init__()
        sizes = [80, *[width] * 6]
        self.convs = nn.Sequential(*[
            nn.Sequential(nn.Conv1d(a, b, 9, padding=4), nn.BatchNorm1d(b), nn.GELU()) for a, b in zip(sizes, sizes[1:])])
        self.head = nn.Conv1d(width, 64, 1)

    def forward(self, x):
        return self.head(self.convs(x))


def main(tick, fixed=False):
    torch.backends.cudnn.benchmark = False
    model = Speech(size(512, 16)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    last = 0
    for step in range(STEPS):
        length = size(400, 16) + step % 4 * size(100, 4)
        if length != last and not fixed:
            torch.cuda.empty_cache()  # STALL: allocator
        last = length
        x = torch.randn(size(64, 2), 80, length, device="cuda")
        y = torch.randint(0, 64, (size(64, 2), length), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
