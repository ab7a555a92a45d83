"""A training script."""
import torch
from common import STEPS, gpt, loss_of, run, size, tokens


def main(tick, fixed=False):
    model = gpt(width=size(512, 64), layers=size(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    bad = torch.zeros((), device="cuda")
    for step in range(STEPS):
        loss = loss_of(model, tokens(batch=size(8, 2)))
        if fixed:
            bad += torch.isnan(loss)
        elif torch.isnan(loss):
            raise RuntimeError("the loss is not a number")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()
    if fixed and bad.item():
        raise RuntimeError("the loss is not a number")


if __name__ == "__main__":
    run(main)
