"""Organs in CT scans by a 3-D U-Net: crops, the Dice loss and its value in every step, whole scans in windows after each epoch, a checkpoint."""
import argparse
import itertools
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORGANS = 5


def double(inner, outer):
    layers = [nn.Conv3d(inner, outer, 3, padding=1, bias=False), nn.InstanceNorm3d(outer, affine=True), nn.LeakyReLU(0.01, inplace=True)]
    return nn.Sequential(*layers, nn.Conv3d(outer, outer, 3, padding=1, bias=False), nn.InstanceNorm3d(outer, affine=True), nn.LeakyReLU(0.01, inplace=True))


class UNet(nn.Module):
    def __init__(self, wide, levels=4):
        super().__init__()
        widths = [wide * 2**level for level in range(levels)]
        self.down = nn.ModuleList(double(inner, outer) for inner, outer in zip([1, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose3d(outer, inner, 2, 2) for inner, outer in zip(widths, widths[1:]))
        self.join = nn.ModuleList(double(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv3d(wide, ORGANS, 1)

    def forward(self, x):
        passed = []
        for level, layer in enumerate(self.down):
            x = layer(F.max_pool3d(x, 2) if level else x)
            passed.append(x)
        for level in reversed(range(len(self.up))):
            x = self.join[level](torch.cat([self.up[level](x), passed[level]], 1))
        return self.head(x)


def dice(logits, labels):
    wanted = F.one_hot(labels, ORGANS).movedim(-1, 1).float()
    said = logits.softmax(1)
    return 1 - (2 * (said * wanted).sum((0, 2, 3, 4)) + 1) / ((said + wanted).sum((0, 2, 3, 4)) + 1)


def scans(count, edge):
    """Noise made smooth, cut into organs by its height."""
    rough = torch.randn(count, 1, *[edge // 8] * 3, device=DEVICE)
    smooth = F.interpolate(rough, scale_factor=8, mode="trilinear")
    labels = torch.bucketize(smooth[:, 0], torch.tensor([-0.8, -0.3, 0.3, 0.8], device=DEVICE))
    return smooth + 0.3 * torch.randn_like(smooth), labels


def crops(images, labels, count, edge):
    places = [(random.randrange(len(images)), *(random.randrange(images.shape[-1] - edge + 1) for _ in range(3))) for _ in range(count)]
    spans = [(scan, slice(x, x + edge), slice(y, y + edge), slice(z, z + edge)) for scan, x, y, z in places]
    return torch.stack([images[(scan, slice(None), *rest)] for scan, *rest in spans]), torch.stack([labels[tuple(span)] for span in spans])


@torch.inference_mode()
def evaluate(model, images, labels, edge):
    """Windows that overlap by half, their logits added up."""
    total = 0.0
    starts = range(0, images.shape[-1] - edge + 1, edge // 2)
    for image, label in zip(images, labels):
        added = torch.zeros(ORGANS, *label.shape, device=DEVICE)
        for x, y, z in itertools.product(starts, starts, starts):
            window = (slice(None), slice(x, x + edge), slice(y, y + edge), slice(z, z + edge))
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                added[window] += model(image[window][None])[0].float()
        total += 1 - dice(added[None] * 10, label[None]).mean().item()
    return total / len(images)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--turns", type=int, default=50, help="of an epoch")
    parser.add_argument("--edge", type=int, default=96)
    parser.add_argument("--wide", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    images, labels = scans(6, options.edge * 2)
    model = UNet(options.wide).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(options.epochs):
            losses = []
            for _ in range(options.turns):
                x, wanted = crops(images[:5], labels[:5], 2, options.edge)
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    logits = model(x)
                loss = F.cross_entropy(logits.float(), wanted) + dice(logits.float(), wanted).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 12.0)
                optimizer.step()
                losses.append(loss.detach() if options.fixed else loss.item())
            mean = float(sum(losses) / len(losses))
            print(f"epoch {epoch}: loss {mean:.4f}, Dice {evaluate(model, images[5:], labels[5:], options.edge):.4f}")
            torch.save(model.state_dict(), Path(folder, f"{epoch}.pt"))
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
