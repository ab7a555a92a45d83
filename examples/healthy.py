"""Train the classifier of slow_loader.py as it should be: workers prepare the batches, which are copied ahead."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

device = "cuda"


class Photographs(Dataset):
    """Random pixels stand for a picture that is read and decoded."""

    def __len__(self):
        return 1280

    def __getitem__(self, index):
        return torch.randint(0, 256, (3, 224, 224), dtype=torch.uint8) / 255, index % 100


def stage(inputs, outputs):
    layers = [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def ahead(loader):
    """Each batch on the device, copied while the GPU is still busy with the one before."""
    side, ready = torch.cuda.Stream(), None
    for batch in loader:
        with torch.cuda.stream(side):
            coming = [part.to(device, non_blocking=True) for part in batch]
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(side)
        for part in coming:
            part.record_stream(torch.cuda.current_stream())
        ready = coming
    yield ready


loader = DataLoader(Photographs(), batch_size=128, shuffle=True, num_workers=2, pin_memory=True)
model = nn.Sequential(
    stage(3, 64), stage(64, 128), stage(128, 256), stage(256, 512),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
total_loss = torch.zeros((), device=device)

for pictures, labels in ahead(loader):
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = cross_entropy(model(pictures), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total_loss += loss.detach()
print(f"mean loss: {total_loss.item() / len(loader):.2f}")
