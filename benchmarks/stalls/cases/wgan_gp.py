"""WGAN with gradient penalty: latent noise, mixing weights and the noise on the images are drawn on the CPU and moved."""
import torch
import torch.nn as nn

from models import STEPS, resnet, run, size

BATCH, LATENT = size(128, 2), 128


def main(tick, fixed=False):
    torch.set_num_threads(1)
    edge = size(64, 16)
    make = nn.Sequential(nn.Linear(LATENT, size(2048, 32)), nn.ReLU(), nn.Linear(size(2048, 32), 3 * edge * edge), nn.Tanh(), nn.Unflatten(1, (3, edge, edge))).to("cuda")
    judge = resnet(width=128, blocks=1, classes=1)
    make_step = torch.optim.Adam(make.parameters(), lr=1e-4, fused=True)
    judge_step = torch.optim.Adam(judge.parameters(), lr=1e-4, fused=True)
    real = torch.randn(BATCH, 3, edge, edge, device="cuda")

    def noise(*shape):
        return torch.randn(shape, device="cuda") if fixed else torch.randn(shape).to("cuda")  # STALL: made_on_host

    for step in range(STEPS):
        fake = make(noise(BATCH, LATENT)).detach()
        blurred = real + 0.05 * noise(*real.shape)
        share = noise(BATCH, 1, 1, 1).sigmoid()
        mixed = (share * blurred + (1 - share) * fake).requires_grad_()
        slope, = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = judge(fake).mean() - judge(blurred).mean() + 10 * penalty
        judge_step.zero_grad()
        loss.backward()
        judge_step.step()
        loss = -judge(make(noise(BATCH, LATENT))).mean()
        make_step.zero_grad()
        loss.backward()
        make_step.step()
        tick()


if __name__ == "__main__":
    run(main)
