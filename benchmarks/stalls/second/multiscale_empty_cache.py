"""Images of five sizes in turn, and after every round of them `empty_cache` "against fragmentation"."""

import torch
import torch.nn.functional as F

from models import STEPS, UNet, run, size

EDGES = [size(edge, edge // 16) for edge in (320, 448, 384, 512, 256)]


def main(tick, fixed=False):
    model = UNet(width=48, outputs=8).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    photos = torch.rand(size(3, 2), 3, size(512, 32), size(512, 32), device="cuda")
    labels = torch.randint(0, 8, (len(photos), 1, *photos.shape[2:]), device="cuda").float()
    for step in range(STEPS):
        edge = EDGES[step % 5]
        x = F.interpolate(photos, size=(edge, edge), mode="bilinear").to(memory_format=torch.channels_last)
        y = F.interpolate(labels, size=(edge, edge)).squeeze(1).long()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4 and not fixed:
            torch.cuda.empty_cache()  # STALL: allocator
        tick()


if __name__ == "__main__":
    run(main)
