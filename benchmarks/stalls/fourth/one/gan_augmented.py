"""A GAN for few pictures: whatever the judge sees is shifted and flipped at random, the more often the surer it is of real ones."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import size

BATCH, EDGE, NOISE = size(64, 2), size(128, 32), 128


class Generator(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.start = nn.Linear(NOISE, 8 * wide * 16)
        layers, inner = [], 8 * wide
        while 4 * 2 ** (len(layers) // 3 + 1) < EDGE:
            layers += [nn.ConvTranspose2d(inner, max(wide, inner // 2), 4, 2, 1), nn.BatchNorm2d(max(wide, inner // 2)), nn.ReLU()]
            inner = max(wide, inner // 2)
        self.body = nn.Sequential(*layers, nn.ConvTranspose2d(inner, 3, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        x = self.start(z)
        return self.body(x.view(len(z), -1, 4, 4).contiguous(memory_format=torch.channels_last))


def judge_of(wide):
    return nn.Sequential(
        nn.Conv2d(3, wide, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(wide, 2 * wide, 4, 2, 1), nn.BatchNorm2d(2 * wide), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * wide, 4 * wide, 4, 2, 1), nn.BatchNorm2d(4 * wide), nn.LeakyReLU(0.2), nn.Conv2d(4 * wide, 1, 4, 1, 1),
    )


def augment_each(images, p):
    out = []
    for image in images:  # STALL: launch_bound
        if random.random() < p:
            image = torch.roll(image, (random.randint(-8, 8), random.randint(-8, 8)), (1, 2))
        if random.random() < p:
            image = image.flip(2)
        if random.random() < p:
            image = image * random.uniform(0.8, 1.2)
        out.append(image)
    return torch.stack(out)


def augment_all(images, p):
    """The same for the whole batch: two gathers with indices drawn on the device. `p` may be a tensor."""
    count, places = len(images), torch.arange(EDGE, device=DEVICE)
    shift = torch.randint(-8, 9, (2, count, 1), device=DEVICE)
    moved, flipped, lit = torch.rand(3, count, 1, device=DEVICE) < p
    shift = torch.where(moved, shift, 0)
    rows, columns = (places - shift[0]) % EDGE, (places - shift[1]) % EDGE
    columns = torch.where(flipped, columns.flip(1), columns)
    images = images.gather(2, rows[:, None, :, None].expand(images.shape)).gather(3, columns[:, None, None, :].expand(images.shape))
    return images * torch.where(lit, torch.empty(count, 1, device=DEVICE).uniform_(0.8, 1.2), 1.0)[:, :, None, None]


def main(tick, fixed=False):
    """`fixed` may also be "augment" or "reads", to mend one of the two alone."""
    augment, unread = augment_all if fixed in (True, "augment") else augment_each, fixed in (True, "reads")
    torch.manual_seed(0)
    random.seed(0)
    with torch.device(DEVICE):
        generator, judge = Generator(size(64, 4)).to(memory_format=torch.channels_last), judge_of(size(96, 4)).to(memory_format=torch.channels_last)
        real_images = torch.rand(512, 3, EDGE, EDGE) * 2 - 1
    makes = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=DEVICE == "cuda")
    judges = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=DEVICE == "cuda")
    p = 0.5 if fixed is not True else torch.full((), 0.5, device=DEVICE)
    sure = torch.zeros((), device=DEVICE)
    history = []
    for step in range(turns(360, 3)):
        real = real_images[torch.randint(0, 512, (BATCH,), device=DEVICE)]
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            fake = generator(torch.randn(BATCH, NOISE, device=DEVICE)).float()
            good, bad = judge(augment(real, p)), judge(augment(fake.detach(), p))
            judge_loss = F.softplus(-good.float()).mean() + F.softplus(bad.float()).mean()
        judges.zero_grad()
        judge_loss.backward()
        judges.step()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.softplus(-judge(augment(fake, p)).float()).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        if fixed is True:
            p = (p + 0.001 * (good.detach().float().sign().mean() - 0.6).sign()).clamp(0, 0.8)
            history.append((judge_loss.detach(), loss.detach()))
        elif unread:  # the loop over images needs a number, so it is looked at every 50 steps only
            sure += good.detach().float().sign().mean()
            history.append((judge_loss.detach(), loss.detach()))
            if step % 50 == 49:
                p = min(0.8, max(0.0, p + (0.05 if sure.item() / 50 > 0.6 else -0.05)))
                sure.zero_()
        else:
            p = min(0.8, max(0.0, p + (0.001 if good.sign().mean().item() > 0.6 else -0.001)))  # STALL: host_sync
            history.append((judge_loss.item(), loss.item()))  # STALL: host_sync
        tick()


if __name__ == "__main__":
    run(main)
