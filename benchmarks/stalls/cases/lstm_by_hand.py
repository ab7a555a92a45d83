"""A recurrent net unrolled in Python, one LSTMCell call per time step, where cuDNN's LSTM does all steps in one call."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size

BATCH, TIME, WIDTH = size(128, 2), size(96, 6), size(512, 16)


def main(tick, fixed=False):
    torch.manual_seed(0)
    cell, whole = nn.LSTMCell(WIDTH, WIDTH).to("cuda"), nn.LSTM(WIDTH, WIDTH).to("cuda")
    head = nn.Linear(WIDTH, 1).to("cuda")
    optimizer = torch.optim.Adam([*(whole if fixed else cell).parameters(), *head.parameters()], lr=1e-3)
    for step in range(STEPS):
        series = torch.randn(TIME, BATCH, WIDTH, device="cuda")
        if fixed:
            outputs, _ = whole(series)
        else:
            h = c = torch.zeros(BATCH, WIDTH, device="cuda")
            outputs = []
            for x in series:
                h, c = cell(x, (h, c))  # STALL: launch_bound
                outputs.append(h)
            outputs = torch.stack(outputs)
        loss = F.mse_loss(head(outputs), series[..., :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
