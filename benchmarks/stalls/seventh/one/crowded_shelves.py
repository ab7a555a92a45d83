"""Products on crowded shelves are counted: a dense detector on pictures of 640 by 640, overlapping boxes of one product suppressed, no training."""
import argparse
import time

import torch
import torch.nn as nn
from torchvision.models import resnet50
from torchvision.ops import batched_nms, nms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SURE, OVERLAP = 0.3, 0.5


class Detector(nn.Module):
    """A box and a score for each product at each cell of 8 by 8 pixels."""

    def __init__(self, products):
        super().__init__()
        body = resnet50(weights=None)
        self.stem = nn.Sequential(body.conv1, body.bn1, body.relu, body.maxpool, body.layer1, body.layer2)
        self.deep = nn.Sequential(body.layer3, body.layer4)
        self.side, self.join = nn.Conv2d(2048, 512, 1), nn.Conv2d(512, 256, 3, padding=1)
        self.scores, self.boxes = nn.Conv2d(256, products, 3, padding=1), nn.Conv2d(256, 4, 3, padding=1)

    def forward(self, pictures):
        near = self.stem(pictures)
        far = nn.functional.interpolate(self.side(self.deep(near)), size=near.shape[-2:], mode="bilinear")
        x = torch.relu(self.join(near + far))
        scores, sizes = self.scores(x).float().flatten(2), self.boxes(x).float().tanh()
        scores = (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True).clamp(min=1e-6)
        y, x = torch.meshgrid(*(torch.arange(side, device=DEVICE) * 8.0 + 4 for side in sizes.shape[-2:]), indexing="ij")
        middle, half = torch.stack([x, y]) + 6 * sizes[:, :2], 20 * torch.exp(0.5 * sizes[:, 2:])
        boxes = torch.cat([middle - half, middle + half], 1).flatten(2)
        return torch.sigmoid(1.5 * scores - 4).mT, boxes.mT


def product_by_product(scores, boxes):
    counts = torch.zeros(scores.shape[0], scores.shape[-1])
    for picture, (picture_scores, picture_boxes) in enumerate(zip(scores, boxes)):
        for product in range(scores.shape[-1]):
            sure = picture_scores[:, product] > SURE
            keep = nms(picture_boxes[sure], picture_scores[sure, product], OVERLAP)
            counts[picture, product] = len(keep)
    return counts


def picture_by_picture(scores, boxes):
    counts = []
    for picture_scores, picture_boxes in zip(scores, boxes):
        cell, product = (picture_scores > SURE).nonzero(as_tuple=True)
        keep = batched_nms(picture_boxes[cell], picture_scores[cell, product], product, OVERLAP)
        counts.append(torch.bincount(product[keep], minlength=scores.shape[-1]))
    return torch.stack(counts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=56)
    options = parser.parse_args()
    batch, edge, products = (2, 96, 3) if options.tiny else (16, 640, 64)
    torch.manual_seed(0)
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    model = Detector(products).to(DEVICE, memory_format=torch.channels_last).eval()
    shelves = torch.randint(0, 256, (batch * 4, 3, edge, edge), dtype=torch.uint8, device=DEVICE)
    stock = []
    with torch.inference_mode():
        for turn in range(options.turns):
            pictures = shelves[turn % 4 * batch :][:batch].float().sub(127).div(70).contiguous(memory_format=torch.channels_last)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                scores, boxes = model(pictures)
            stock.append((picture_by_picture if options.fixed else product_by_product)(scores, boxes))
    found = torch.stack(stock).float().mean().item()
    print(f"{found:.2f} of each product on a picture")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
