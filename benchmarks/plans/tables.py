"""A recommender: large tables of which a batch reads some rows, and small dense layers. Memory is what it needs."""

from itertools import pairwise

import torch
from told import loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

import keepbusy

TABLES, ROWS, WIDTH, BATCH, STEPS = 26, 200_000, 64, 8192, 14


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(TABLES))
        widths = [TABLES * WIDTH, 1024, 512, 256]
        layers = [(nn.Linear(one, other), nn.ReLU()) for one, other in pairwise(widths)]
        self.dense = nn.Sequential(*(part for layer in layers for part in layer), nn.Linear(256, 1))

    def forward(self, x):
        return self.dense(torch.cat([table(column) for table, column in zip(self.tables, x.unbind(1), strict=True)], 1))


torch.manual_seed(0)
with torch.device("cuda"):
    model = Recommender()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randint(ROWS, (BATCH * STEPS, TABLES)), torch.rand(BATCH * STEPS, 1))
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, collate_fn=torch.utils.data.default_collate)
model, optimizer, loader = keepbusy.spread(model, optimizer, loader)
for x, y in loop(loader):
    loss = F.binary_cross_entropy_with_logits(model(x.cuda()), y.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
