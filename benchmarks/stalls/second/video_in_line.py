"""Clips in pinned memory, moved without waiting, but on the stream that then computes on them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, encoder, prefetch, run, size

BATCH, FRAMES, EDGE, CUBE = size(16, 2), size(16, 4), size(224, 32), (2, 16, 16)


class Video(nn.Module):
    """A transformer over cubes of two frames and 16 by 16 pixels."""

    def __init__(self):
        super().__init__()
        self.body = encoder(width=512, layers=3)
        width = self.body.layers[0].linear1.in_features
        self.cubes, self.head = nn.Linear(3 * CUBE[0] * CUBE[1] * CUBE[2], width), nn.Linear(width, 400)

    def forward(self, clip):
        for axis, length in zip((2, 3, 4), CUBE):
            clip = clip.unfold(axis, length, length)
        return self.head(self.body(self.cubes(clip.permute(0, 2, 3, 4, 1, 5, 6, 7).flatten(4).flatten(1, 3))).mean(1))


def main(tick, fixed=False):
    clips = [torch.rand(BATCH, 3, FRAMES, EDGE, EDGE) for _ in range(3)]
    with torch.device("cuda"):
        model = Video()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    y = torch.randint(0, 400, (BATCH,), device="cuda")
    if fixed:
        ahead = prefetch([(clip,) for clip in clips])
    else:
        clips = [clip.pin_memory() for clip in clips]
    for step in range(STEPS):
        if fixed:
            (clip,) = next(ahead)
        else:
            clip = clips[step % 3].to("cuda", non_blocking=True)  # STALL: copy_not_overlapped
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(clip), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
