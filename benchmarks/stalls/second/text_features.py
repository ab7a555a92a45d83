"""Features of texts for a search index: no training, no autocast; every batch of half-precision features goes to a list."""

import torch
import torch.nn as nn

from models import STEPS, encoder, run, size

BATCH, LENGTH, VOCAB = size(32, 2), size(512, 8), size(30000, 50)


@torch.no_grad()
def main(tick, fixed=False):
    with torch.device("cuda"):
        body = encoder(width=768, layers=12, heads=12)
        width = body.layers[0].linear1.in_features
        embed = nn.Embedding(VOCAB, width)
    body, embed = body.half().eval(), embed.half()
    texts = torch.randint(0, VOCAB, (8, BATCH, LENGTH), device="cuda")
    features, room = [], torch.empty(STEPS if fixed else 0, BATCH, LENGTH, width, dtype=torch.half, pin_memory=True)
    for step in range(STEPS):
        out = body(embed(texts[step % 8]))
        if fixed:
            room[step].copy_(out, non_blocking=True)
            features.append(room[step])
        else:
            features.append(out.cpu())  # STALL: blocking_copy
        tick()
    torch.cuda.synchronize()


if __name__ == "__main__":
    run(main)
