"""Texts are cut into word pieces in Python between the steps, and the lists become a device tensor on the spot."""
import random

import torch
import torch.nn.functional as F

from models import STEPS, TextClassifier, run, size

BATCH, LENGTH = size(128, 2), size(256, 8)
ENDS = ("ack", "end", "ing", "ost", "ule", "arm", "ick", "old")
WORDS = [a + b + c for a in "bcdfghjklmnpqrst" for b in ENDS for c in ENDS]
VOCAB = {piece: number + 1 for number, piece in enumerate([*"abcdefghijklmnopqrstuvwxyz.", *ENDS])}


def encode(texts):
    """The longest known piece first, as WordPiece does it."""
    rows = []
    for text in texts:
        row = []
        for word in text.split():
            start = 0
            while word[start:]:
                end = start + 4
                while word[start:end] not in VOCAB:
                    end -= 1
                row += [VOCAB[word[start:end]]]
                start = end
        rows.append(row[:LENGTH] + [0] * (LENGTH - len(row)))
    return rows


def main(tick, fixed=False):
    random.seed(0)
    texts = [" ".join(random.choices(WORDS, k=LENGTH // 3)) + "." for _ in range(8 * BATCH)]
    with torch.device("cuda"):
        model = TextClassifier(vocab=len(VOCAB) + 1, width=512, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    y = torch.randint(0, 20, (BATCH,), device="cuda")
    if fixed:
        encoded = torch.tensor(encode(texts)).pin_memory()  # once, before training
    for step in range(STEPS):
        at = step % 8 * BATCH
        if fixed:
            x = encoded[at : at + BATCH].to("cuda", non_blocking=True)
        else:
            x = torch.tensor(encode(texts[at : at + BATCH]), device="cuda")  # STALL: host_work
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
