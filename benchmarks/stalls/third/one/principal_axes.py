"""The principal axes of a large table: a script from top to bottom, without any loop."""
import torch
from script import DEVICE, run, turns

from models import size

ROWS, COLUMNS = size(turns(1100000, 100), 100), size(1024, 16)


def main(tick, fixed=False):
    torch.manual_seed(0)
    table = torch.randn(ROWS, COLUMNS, device=DEVICE) if fixed else torch.randn(ROWS, COLUMNS).to(DEVICE)  # STALL: made_on_host
    table = table * torch.linspace(1, 3, COLUMNS, device=DEVICE)
    table -= table.mean(0)
    spread, axes = torch.linalg.eigh(table.T @ table / (ROWS - 1))
    scores = table @ axes[:, -64:]
    nearest = torch.cdist(scores[: size(40000, 50)], scores[-size(20000, 50) :]).argmin(1)
    explained = spread[-64:].sum() / spread.sum()
    tick()
    return explained.item(), nearest.unique().numel()


if __name__ == "__main__":
    run(main)
