"""A recommender's batch is a dictionary of forty small tensors, moved one by one."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size

TABLES, BATCH = size(40, 4), size(8192, 8)


class Recommender(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size(20000, 50), width) for _ in range(TABLES))
        self.top = nn.Sequential(nn.Linear(TABLES * width, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, columns):
        return self.top(torch.cat([table(column) for table, column in zip(self.tables, columns)], 1)).squeeze(1)


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = Recommender()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    batches = [{f"field{i}": torch.randint(0, size(20000, 50), (BATCH,)) for i in range(TABLES)} for _ in range(4)]
    clicked = torch.randint(0, 2, (BATCH,), device="cuda").float()
    if fixed:
        stacked = [torch.stack(list(batch.values())).pin_memory() for batch in batches]  # one tensor travels
    for step in range(STEPS):
        if fixed:
            columns = stacked[step % 4].to("cuda", non_blocking=True).unbind(0)
        else:
            columns = [column.to("cuda") for column in batches[step % 4].values()]  # STALL: blocking_copy
        loss = F.binary_cross_entropy_with_logits(model(columns), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
