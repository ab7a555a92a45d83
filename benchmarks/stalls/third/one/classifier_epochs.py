"""Epochs of training, each with an evaluation that fills a confusion matrix and with a checkpoint if it is the best so far."""
import tempfile

import torch
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import TextClassifier, size

CLASSES, BATCH, LENGTH = 20, size(96, 4), size(128, 8)


def batches(count, seed):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, 8192, (BATCH, LENGTH), device=DEVICE, generator=generator)
        yield tokens, tokens[:, 0] % CLASSES


def train(model, optimizer, count, seed, tick):
    model.train()
    for tokens, labels in batches(count, seed):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


@torch.no_grad()
def evaluate(model, count, fixed):
    model.eval()
    if fixed:
        matrix = torch.zeros(CLASSES * CLASSES, device=DEVICE)
        one = torch.ones(BATCH, device=DEVICE)
        for tokens, labels in batches(count, seed=0):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                predicted = model(tokens).argmax(1)
            matrix.scatter_add_(0, labels * CLASSES + predicted, one)
        return matrix.view(CLASSES, CLASSES).trace().item() / (count * BATCH)
    matrix = torch.zeros(CLASSES, CLASSES)
    for tokens, labels in batches(count, seed=0):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            predicted = model(tokens).argmax(1)
        for label, guess in zip(labels, predicted):
            matrix[label.item(), guess.item()] += 1  # STALL: host_sync
    return (matrix.trace() / matrix.sum()).item()


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = TextClassifier(width=512, layers=6, classes=CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    best = -1.0
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(turns(6, 1)):
            train(model, optimizer, size(120, 2), epoch + 1, tick)
            accuracy = evaluate(model, size(60, 2), fixed)
            if accuracy > best:
                best = accuracy
                torch.save({"model": model.state_dict(), "epoch": epoch}, f"{folder}/best.pt")


if __name__ == "__main__":
    run(main)
