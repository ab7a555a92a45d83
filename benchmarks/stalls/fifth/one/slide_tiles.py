"""Features of the tiles of a whole-slide image by a ResNet-50, in bfloat16; tiles go through one buffer in pinned memory."""
import numpy as np
import torch
from setting import DEVICE, run, size, turns
from torchvision.models import resnet18, resnet50

BATCH, EDGE, SLIDE = size(384, 4), size(224, 32), size(12288, 256)


class Slide:
    """Stands in for openslide: one large picture in memory, and the places where there is tissue."""

    def __init__(self, tiles):
        rng = np.random.default_rng(0)
        patch = rng.integers(0, 256, (SLIDE // 4, SLIDE // 4, 3), dtype=np.uint8)
        self.pixels = np.tile(patch, (4, 4, 1))
        self.places = rng.integers(0, SLIDE - EDGE, (tiles, 2))

    def batches(self):
        for start in range(0, len(self.places), BATCH):
            yield start, self.places[start : start + BATCH]

    def read(self, places, out):
        for tile, (row, column) in zip(out, places):
            tile[:] = self.pixels[row : row + EDGE, column : column + EDGE]
        return len(places)


class Extractor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = (resnet18 if EDGE == 32 else resnet50)(num_classes=0 + 1)
        self.wide = self.net.fc.in_features
        self.net.fc = torch.nn.Identity()
        self.register_buffer("mean", torch.tensor([0.7, 0.55, 0.7]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.25, 0.2]).view(3, 1, 1))

    def forward(self, tiles):
        x = tiles.permute(0, 3, 1, 2).to(self.mean.dtype) / 255
        return self.net((x - self.mean) / self.std)


@torch.inference_mode()
def main(variant):
    """`variant` may also be "buffer" or "features", to mend one of the two alone."""
    early, kept = variant in ("fixed", "buffer"), variant in ("fixed", "features")
    cuda = DEVICE == "cuda"
    slide = Slide(turns(230, 3) * BATCH)
    model = Extractor().eval().to(DEVICE, torch.bfloat16, memory_format=torch.channels_last)
    buffer = torch.empty(BATCH, EDGE, EDGE, 3, dtype=torch.uint8, pin_memory=cuda)
    moved = torch.cuda.Event() if cuda else None
    features = torch.empty(len(slide.places), model.wide, device=DEVICE, dtype=torch.bfloat16) if kept else []
    for start, places in slide.batches():
        if cuda and early and start:
            moved.synchronize()  # the buffer may be written to as soon as its last copy is over
        count = slide.read(places, buffer.numpy())
        tiles = buffer[:count].to(DEVICE, non_blocking=True)
        if cuda:
            moved.record()
        out = model(tiles)
        if kept:
            features[start : start + count] = out
        else:
            features.append(out.float().cpu().numpy())
        if cuda and not early:
            torch.cuda.current_stream().synchronize()  # the buffer is about to be written to
    features = features.float().cpu().numpy() if kept else np.concatenate(features)
    print(f"{features.shape[0]} tiles, mean feature {features.mean():.5f}")


if __name__ == "__main__":
    run(main)
