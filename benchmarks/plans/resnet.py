"""A ResNet-50 on images, written for one GPU but for the call of `spread`."""

import torch
import torchvision
from told import loop
from torch.nn import functional as F  # noqa: N812

import keepbusy

BATCH, STEPS = 128, 14

torch.manual_seed(0)
model = torchvision.models.resnet50().cuda()
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
