"""DCGAN with its usual log line: five numbers are read in the middle of each step, after each half of the discriminator's."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size

BATCH, WIDE, LATENT = size(64, 4), size(96, 8), 100


def generator():
    layers, inner = [nn.ConvTranspose2d(LATENT, 8 * WIDE, 4, 1, 0), nn.BatchNorm2d(8 * WIDE), nn.ReLU()], 8 * WIDE
    for outer in (4 * WIDE, 2 * WIDE, WIDE):
        layers += [nn.ConvTranspose2d(inner, outer, 4, 2, 1), nn.BatchNorm2d(outer), nn.ReLU()]
        inner = outer
    return nn.Sequential(*layers, nn.ConvTranspose2d(inner, 3, 4, 2, 1), nn.Tanh())


def critic():
    layers, inner = [nn.Conv2d(3, WIDE, 4, 2, 1), nn.LeakyReLU(0.2)], WIDE
    for outer in (2 * WIDE, 4 * WIDE, 8 * WIDE):
        layers += [nn.Conv2d(inner, outer, 4, 2, 1), nn.BatchNorm2d(outer), nn.LeakyReLU(0.2)]
        inner = outer
    return nn.Sequential(*layers, nn.Conv2d(inner, 1, 4), nn.Flatten(0))


def main(tick, fixed=False):
    make, judge = generator().to("cuda"), critic().to("cuda")
    make_step = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judge_step = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real = torch.randn(BATCH, 3, 64, 64, device="cuda").tanh()
    yes, no = torch.ones(BATCH, device="cuda"), torch.zeros(BATCH, device="cuda")
    history = []
    read = torch.Tensor.detach if fixed else torch.Tensor.item
    for step in range(STEPS):
        judge_step.zero_grad()
        out = judge(real)
        loss_real = F.binary_cross_entropy_with_logits(out, yes)
        loss_real.backward()
        d_x = read(out.sigmoid().mean())  # STALL: host_sync
        fake = make(torch.randn(BATCH, LATENT, 1, 1, device="cuda"))
        out = judge(fake.detach())
        loss_fake = F.binary_cross_entropy_with_logits(out, no)
        loss_fake.backward()
        d_g = read(out.sigmoid().mean())  # STALL: host_sync
        judge_step.step()
        make_step.zero_grad()
        loss_make = F.binary_cross_entropy_with_logits(judge(fake), yes)
        loss_make.backward()
        make_step.step()
        history.append((read(loss_real + loss_fake), read(loss_make), d_x, d_g))  # STALL: host_sync
        tick()


if __name__ == "__main__":
    run(main)
