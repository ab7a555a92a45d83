"""Pictures with some of 80 labels each, by a ResNet; torchmetrics follows accuracy and mean average precision while it trains."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchmetrics
from setting import DEVICE, run, size, turns
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score
from torchvision.models import resnet18, resnet34

BATCH, EDGE, LABELS = size(256, 4), size(224, 32), size(80, 5)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = (resnet18 if EDGE == 32 else resnet34)(num_classes=LABELS)

    def forward(self, images):
        return self.body((images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last))


class AsymmetricLoss(nn.Module):
    def __init__(self, positive=0.0, negative=4.0, shift=0.05):
        super().__init__()
        self.positive, self.negative, self.shift = positive, negative, shift

    def forward(self, logits, targets):
        p = logits.sigmoid()
        low = (p - self.shift).clamp(min=0)
        hit = targets * (1 - p) ** self.positive * F.logsigmoid(logits)
        miss = (1 - targets) * low**self.negative * (1 - low).clamp(min=1e-8).log()
        return -(hit + miss).sum() / len(logits)


class Batches:
    """A few thousand pictures as bytes in device memory."""

    def __init__(self, count):
        with torch.device(DEVICE):
            self.images = torch.randint(0, 256, (count, 3, EDGE, EDGE), dtype=torch.uint8)
            often = torch.rand(LABELS) * 0.15 + 0.01
            self.targets = (torch.rand(count, LABELS) < often).long()

    def __call__(self, steps):
        for _ in range(steps):
            picked = torch.randint(0, len(self.images), (BATCH,), device=DEVICE)
            images = self.images[picked]
            yield torch.where(torch.rand(BATCH, 1, 1, 1, device=DEVICE) < 0.5, images, images.flip(3)), self.targets[picked]


def main(variant):
    epochs, steps = size(2, 1), turns(75, 3)
    torch.backends.cudnn.benchmark = True
    model = Tagger().to(DEVICE, memory_format=torch.channels_last)
    criterion = AsymmetricLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    precision = MultilabelAveragePrecision(LABELS, average="macro", thresholds=None, validate_args=variant == "stalled")
    score = MultilabelF1Score(LABELS, validate_args=variant == "stalled")
    metrics = torchmetrics.MetricCollection({"map": precision, "f1": score}, compute_groups=False).to(DEVICE)
    batches = Batches(size(4096, 16))
    for epoch in range(epochs):
        losses = torch.zeros((), device=DEVICE)
        for images, targets in batches(steps):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                logits = model(images)
            loss = criterion(logits.float(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.detach()
            if variant == "fixed":
                metrics.update(logits.detach().float().sigmoid(), targets)
            else:
                metrics(logits.detach().float().sigmoid(), targets)
        seen = metrics.compute()
        print(f"epoch {epoch}: loss {losses.item() / steps:.3f}, " + ", ".join(f"{name} {value.item():.4f}" for name, value in seen.items()))
        metrics.reset()


if __name__ == "__main__":
    run(main)
