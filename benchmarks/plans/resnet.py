"""A ResNet-50 on images, written for one GPU but for the call of `spread`."""

import torch
from told import loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

import keepbusy

BATCH, STEPS, STAGES = 128, 14, ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


class Bottleneck(nn.Module):
    def __init__(self, inward, width, stride):
        super().__init__()
        shapes = (inward, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)
        parts = [(nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b)) for a, b, k, s in shapes]
        self.a, self.b, self.c = (nn.Sequential(*one) for one in parts)
        self.past = nn.Sequential()
        if inward != 4 * width:
            self.past = nn.Sequential(nn.Conv2d(inward, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))) + self.past(x))


def blocks():
    inward = 64
    for width, count, stride in STAGES:
        for number in range(count):
            yield Bottleneck(inward, width, 1 if number else stride)
            inward = 4 * width


torch.manual_seed(0)
stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
model = nn.Sequential(*stem, *blocks(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.rand(BATCH * STEPS, 3, 64, 64), torch.randint(1000, (BATCH * STEPS,)))
loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
model, optimizer, loader = keepbusy.spread(model, optimizer, loader)
for x, y in loop(loader):
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x.cuda()).float(), y.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
