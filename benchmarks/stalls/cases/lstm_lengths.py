"""The lengths of a padded batch are computed on the GPU and read back for `pack_padded_sequence`. The host has collated by then, so the read costs nothing."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from models import STEPS, run, size

VOCAB, BATCH, LENGTH = 5000, size(256, 4), size(200, 12)


class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        return self.head(self.lstm(packed)[1][0][-1])


def collate(step):
    """Pads a batch of Python lists, longest first: a few milliseconds of host work."""
    rows = [[(step + 7 * i + j) % (VOCAB - 1) + 1 for j in range(LENGTH - i * LENGTH // (2 * BATCH))] for i in range(BATCH)]
    padded = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    return padded.pin_memory(), torch.tensor([len(row) for row in rows])


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = Tagger(size(1024, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    y = torch.randint(0, 10, (BATCH,), device="cuda")
    for step in range(STEPS):
        batch, lengths = collate(step)
        x = batch.to("cuda", non_blocking=True)
        if not fixed:
            lengths = (x != 0).sum(1).cpu()  # STALL: host_sync
        loss = F.cross_entropy(model(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
