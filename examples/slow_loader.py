"""Train a classifier of photographs, each cropped and coloured anew every time it is seen."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset

device = "cuda"


class Photographs(Dataset):
    """Random pixels stand for a picture that is read and decoded."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        photograph = torch.randint(0, 256, (3, 320, 320), dtype=torch.uint8) / 255
        top, left = torch.randint(0, 64, (2,)).tolist()
        part = photograph[None, :, top : top + 256, left : left + 256]
        picture = interpolate(part, size=(224, 224), mode="bilinear")[0]
        contrast, brightness = torch.empty(2).uniform_(0.8, 1.2)
        return (picture - 0.5) * contrast + 0.5 * brightness, index % 100


def stage(inputs, outputs):
    layers = [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


loader = DataLoader(Photographs(), batch_size=64, shuffle=True)
model = nn.Sequential(
    stage(3, 64), stage(64, 128), stage(128, 256), stage(256, 512),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for pictures, labels in loader:
    pictures, labels = pictures.to(device), labels.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = cross_entropy(model(pictures), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"the last loss: {loss.item():.2f}")
