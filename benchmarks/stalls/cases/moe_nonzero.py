"""Each expert of a mixture finds its tokens with `nonzero`: one host sync per expert and layer."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size


class Mixture(nn.Module):
    def __init__(self, width, experts, fixed):
        super().__init__()
        self.router, self.fixed = nn.Linear(width, experts), fixed
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts))

    def forward(self, x):
        scores = F.softmax(self.router(x), dim=-1)
        choice, out = scores.argmax(-1), torch.zeros_like(x)
        if self.fixed:  # each expert chooses its share of the tokens: a fixed count
            shares = scores.topk(len(x) // len(self.experts), dim=0).indices.unbind(1)
        for number, expert in enumerate(self.experts):
            index = shares[number] if self.fixed else (choice == number).nonzero().squeeze(-1)  # STALL: host_sync
            out = out.index_add(0, index, expert(x[index]) * scores[index, number].unsqueeze(-1))
        return x + out


def main(tick, fixed=False):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    width = size(768, 16)
    with torch.device("cuda"):
        model = nn.Sequential(*[Mixture(width, 8, fixed) for _ in range(size(3, 2))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        x = torch.randn(size(8192, 64), width, device="cuda")
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
