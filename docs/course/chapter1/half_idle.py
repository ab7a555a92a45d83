"""A training loop that looks at its loss in every step, and only then prepares the next batch."""

import time

import torch
from torch import nn

READ_EVERY = 1

model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
losses = []
for step in range(1, 31):
    if step == 11:
        torch.cuda.synchronize()
        begin = time.perf_counter()
    batch = torch.rand(384, 4096).pin_memory().to("cuda", non_blocking=True)  # the host prepares a batch
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % READ_EVERY == 0:
        losses.append(loss.item())
torch.cuda.synchronize()
print(f"{len(losses)} losses read, {(time.perf_counter() - begin) * 1e3 / 20:.1f} ms a step")
