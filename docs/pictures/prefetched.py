"""Batches that `keepbusy.prefetch` copies beside the computation: what docs/pictures/overlapped.png shows.

keepbusy run --memory --save prefetched.busy docs/pictures/prefetched.py
"""

import torch
from torch import nn

import keepbusy

model = nn.Sequential(
    *(nn.Conv2d(3, 64, 7, stride=4), nn.ReLU(), nn.Conv2d(64, 256, 3, stride=2), nn.ReLU()),
    *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
images, labels = torch.ones(256, 3, 224, 224), torch.zeros(256, dtype=torch.long)

losses = []
for batch, target in keepbusy.prefetch((images, labels) for _ in range(40)):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(batch), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(keepbusy.readback(loss))
