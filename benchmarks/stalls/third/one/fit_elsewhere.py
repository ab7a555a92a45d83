"""The loop is in `Trainer.fit`, in a module of its own; this file only says what is fitted. Texts become numbers on the way."""
import random
import zlib

import torch
import torch.nn.functional as F
from fitting.trainer import Trainer
from script import DEVICE, run, turns

from models import TextClassifier, size

BATCH, LENGTH = size(64, 2), size(128, 8)


def batches(count):
    source = random.Random(0)
    words = [f"word{number}" for number in range(5000)]
    texts = [" ".join(source.choices(words, k=LENGTH)) for _ in range(1000)]
    for _ in range(count):
        tokens = [[zlib.crc32(word.encode()) % 8192 for word in text.split()] for text in source.choices(texts, k=BATCH)]
        x, y = torch.tensor(tokens), torch.tensor([row[0] % 20 for row in tokens])
        yield (x.pin_memory(), y.pin_memory()) if DEVICE == "cuda" else (x, y)


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = TextClassifier(width=512, layers=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    trainer = Trainer(model, optimizer, DEVICE, read=torch.detach if fixed else float, on_step=lambda _: tick())
    trainer.fit(batches(turns(700, 3)), F.cross_entropy)


if __name__ == "__main__":
    run(main)
