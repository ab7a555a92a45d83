"""torchrun: gradients of eight small pieces add up to one step, but DDP sums them over the ranks after each, in small buckets."""
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.parallel import DistributedDataParallel

from models import encoder, size

PIECES, BATCH, LENGTH, VOCAB = size(8, 2), size(4, 2), size(256, 8), size(16384, 64)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = encoder(2048, layers=5, heads=16)
        width = self.body.layers[0].linear1.in_features
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens), mask=self.later, is_causal=True))


def main(tick, fixed=False):
    """`fixed` may also be "sync" or "buckets", to mend one of the two alone."""
    once, large = fixed in (True, "sync"), fixed in (True, "buckets")
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Language()
        tokens = torch.randint(0, VOCAB, (PIECES, BATCH, LENGTH + 1))
    model = DistributedDataParallel(model, bucket_cap_mb=50 if large else 1, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    for step in range(turns(110, 2)):
        for number, piece in enumerate(tokens):
            with model.no_sync() if once and number < PIECES - 1 else contextlib.nullcontext():
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    scores = model(piece[:, :-1])
                    loss = F.cross_entropy(scores.flatten(0, 1), piece[:, 1:].flatten()) / PIECES
                loss.backward()  # STALL: exposed_collective
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        tick()


if __name__ == "__main__":
    run(main)
