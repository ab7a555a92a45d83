"""A generator and a discriminator in turn; the discriminator sees a pool of older fakes, which is kept in host memory."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import UNet, size

BATCH, EDGE = size(32, 2), size(160, 16)


class Pool:
    """The last 200 fakes; half of the time a fake is swapped for one from here, as in CycleGAN."""

    def __init__(self, device):
        self.images, self.device, self.random = [], device, random.Random(0)

    def query(self, fakes):
        out = []
        for image in fakes.detach().to(self.device):  # STALL: blocking_copy
            if len(self.images) < 200:
                self.images.append(image)
                out.append(image)
            elif self.random.random() < 0.5:
                place = self.random.randrange(200)
                out.append(self.images[place])
                self.images[place] = image
            else:
                out.append(image)
        return torch.stack(out).to(fakes.device)


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        generator, wide = UNet(48), size(64, 4)
        judge = nn.Sequential(
            nn.Conv2d(3, wide, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(wide, 2 * wide, 4, 2, 1), nn.BatchNorm2d(2 * wide), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * wide, 4 * wide, 4, 2, 1), nn.BatchNorm2d(4 * wide), nn.LeakyReLU(0.2), nn.Conv2d(4 * wide, 1, 4, 1, 1),
        )
    makes, judges = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999)), torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    pool = Pool(DEVICE if fixed else "cpu")
    for step in range(turns(450, 3)):
        drawn, real = torch.rand(2, BATCH, 3, EDGE, EDGE, device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            fake = generator(drawn).float()
            verdict = judge(fake)
            loss = F.mse_loss(verdict, torch.ones_like(verdict)) + 10 * F.l1_loss(fake, drawn)
        makes.zero_grad()
        loss.backward()
        makes.step()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            good, bad = judge(real), judge(pool.query(fake))
            loss = F.mse_loss(good, torch.ones_like(good)) + F.mse_loss(bad, torch.zeros_like(bad))
        judges.zero_grad()
        loss.backward()
        judges.step()
        tick()


if __name__ == "__main__":
    run(main)
