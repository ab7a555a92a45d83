"""Documents are packed into rows of equal length by a Python loop that takes longer than the GPU's step."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, encoder, run, size

ROWS, LENGTH, VOCAB = size(64, 2), size(512, 32), size(16000, 50)


def pack(documents):
    """First fit: tokens, positions and document numbers of ROWS rows."""
    rows, positions, numbers = ([[] for _ in range(ROWS)] for _ in range(3))
    for number, document in enumerate(documents):
        for row, position, owner in zip(rows, positions, numbers):
            if len(row) + len(document) <= LENGTH:
                row.extend(document)
                position.extend(range(len(document)))
                owner.extend([number] * len(document))
                break
    for columns in rows, positions, numbers:
        for row in columns:
            row.extend([0] * (LENGTH - len(row)))
    return torch.tensor([rows, positions, numbers]).pin_memory()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = encoder(width=512, layers=2)
        width = self.body.layers[0].linear1.in_features
        self.token, self.place, self.head = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width), nn.Linear(width, 256)

    def forward(self, tokens, positions):
        return self.head(self.body(self.token(tokens) + self.place(positions)))


def main(tick, fixed=False):
    random.seed(0)
    batches = [[[random.randrange(VOCAB) for _ in range(random.randrange(4, LENGTH // 4))] for _ in range(9 * ROWS)] for _ in range(4)]
    if fixed:
        batches = [pack(documents) for documents in batches]  # once, before training
    with torch.device("cuda"):
        model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(STEPS):
        packed = batches[step % 4] if fixed else pack(batches[step % 4])  # STALL: host_work
        tokens, positions, numbers = packed.to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), (numbers % 256).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
