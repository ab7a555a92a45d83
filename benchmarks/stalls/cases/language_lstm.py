"""A word-level language model as one should write it: a small pinned copy, the loss read every tenth step."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size

VOCAB, BATCH, LENGTH, WIDTH = size(8000, 50), size(128, 2), size(70, 5), size(1024, 16)


def main(tick, fixed=False):
    with torch.device("cuda"):
        embed, lstm, head = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, VOCAB)
    model = nn.ModuleList([embed, lstm, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    corpus = torch.randint(0, VOCAB, (STEPS + 1, LENGTH + 1, BATCH)).pin_memory()
    for step in range(STEPS):
        text = corpus[step].to("cuda", non_blocking=True)
        out, _ = lstm(embed(text[:-1]))
        loss = F.cross_entropy(head(out).flatten(0, 1), text[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if step % 10 == 9 and not fixed:
            print(f"{loss.item():.2f}", end=" ")  # STALL: host_sync
        tick()
    print()


if __name__ == "__main__":
    run(main)
