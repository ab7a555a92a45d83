"""Networks and sizes that the cases share.

A case defines `main(tick, fixed)`: STEPS steps, `tick()` once at the end of each. The line that stalls ends
with `# STALL: <cause>`; `fixed=True` runs the fixed script. Cases neither time nor profile themselves.
"""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

SMALL = os.environ.get("STALLBENCH_SMALL") == "1"
STEPS = int(os.environ.get("STALLBENCH_STEPS", 4 if SMALL else 40))


def size(full, small):
    """`full` on a GPU, `small` where STALLBENCH_SMALL=1 asks for shapes that a CPU can bear."""
    return small if SMALL else full


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )
        self.skip = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet(width=64, blocks=2, classes=1000):
    """Four stages of `blocks` residual blocks; blocks=2 is about a ResNet-18."""
    width = size(width, 8)
    with torch.device("cuda"):
        layers, inner = [nn.Conv2d(3, width, 7, 4, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()], width
        for stage in range(4):
            for block in range(size(blocks, 1)):
                outer = width * 2**stage
                layers.append(Residual(inner, outer, 2 if stage and not block else 1))
                inner = outer
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))
    return net.to(memory_format=torch.channels_last)


def encoder(width=512, layers=6, heads=8):
    """A stack of PyTorch's own transformer layers, without dropout."""
    width = size(width, 32)
    layer = nn.TransformerEncoderLayer(width, size(heads, 4), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, size(layers, 2), enable_nested_tensor=False)


class TextClassifier(nn.Module):
    def __init__(self, vocab=8192, classes=20, **shape):
        super().__init__()
        self.body = encoder(**shape)
        width = self.body.layers[0].linear1.in_features
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)).mean(1))


class ViT(nn.Module):
    def __init__(self, patch=16, classes=1000, **shape):
        super().__init__()
        self.body = encoder(**shape)
        width = self.body.layers[0].linear1.in_features
        self.patches, self.head = nn.Conv2d(3, width, patch, patch), nn.Linear(width, classes)

    def forward(self, images):
        return self.head(self.body(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


class UNet(nn.Module):
    """Two scales down and up again, `outputs` planes of the input's size."""

    def __init__(self, width=64, outputs=3):
        super().__init__()
        width = size(width, 8)
        self.first, self.down = Residual(3, width, 1), Residual(width, 2 * width, 2)
        self.deep = nn.Sequential(Residual(2 * width, 4 * width, 2), Residual(4 * width, 4 * width, 1))
        self.up, self.top = Residual(6 * width, 2 * width, 1), Residual(3 * width, width, 1)
        self.out = nn.Conv2d(width, outputs, 1)

    def forward(self, x):
        fine = self.first(x)
        coarse = self.down(fine)
        x = F.interpolate(self.deep(coarse), scale_factor=2.0)
        x = F.interpolate(self.up(torch.cat([x, coarse], 1)), scale_factor=2.0)
        return self.out(self.top(torch.cat([x, fine], 1)))


def prefetch(batches, steps=STEPS):
    """Pinned batches (tuples of tensors), copied to the device on a stream of their own, one step ahead."""
    batches = [tuple(tensor.pin_memory() for tensor in batch) for batch in batches]
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def fetch(step):
        with torch.cuda.stream(side):
            return [tensor.to("cuda", non_blocking=True) for tensor in batches[step % len(batches)]]

    ahead = fetch(0)
    for step in range(steps):
        current.wait_stream(side)
        batch = ahead
        for tensor in batch:
            tensor.record_stream(current)
        ahead = fetch(step + 1)
        yield batch


def run(main):
    """As a plain script: `python case.py [--fixed]`, or under torchrun."""
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    main(lambda: None, fixed="--fixed" in sys.argv)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
