"""Trains a timm ViT-S on pictures in device memory; an average of the weights is kept in host memory, "to spare the GPU's"."""
import numpy as np
import timm
import torch
import torch.nn.functional as F
from setting import DEVICE, run, size, turns
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

BATCH, EDGE, CLASSES = size(192, 2), size(224, 32), 1000


def make_model():
    if EDGE == 32:
        return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=CLASSES, drop_path_rate=0.1)
    return timm.create_model("vit_small_patch16_224", num_classes=CLASSES, drop_path_rate=0.1)


class Pictures:
    """The whole set as bytes on the device, normalized there; stands in for FFCV or DALI."""

    def __init__(self, count):
        self.images = torch.randint(0, 256, (count, 3, EDGE, EDGE), dtype=torch.uint8, device=DEVICE)
        self.labels = torch.randint(0, CLASSES, (count,), device=DEVICE)
        self.mean = torch.tensor([0.485, 0.456, 0.406], device=DEVICE).view(3, 1, 1) * 255
        self.std = torch.tensor([0.229, 0.224, 0.225], device=DEVICE).view(3, 1, 1) * 255

    def epoch(self, steps):
        for _ in range(steps):
            picked = torch.randint(0, len(self.images), (BATCH,), device=DEVICE)
            yield (self.images[picked].float() - self.mean) / self.std, self.labels[picked]


@torch.inference_mode()
def validate(model, pictures, steps):
    right = torch.zeros((), device=DEVICE)
    for images, labels in pictures.epoch(steps):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            right += (model(images).argmax(1) == labels).sum()
    return right.item() / (steps * BATCH)


def main(variant):
    epochs, steps = size(3, 1), turns(70, 3)
    model = make_model().to(DEVICE)
    average = ModelEmaV3(model, decay=0.9998, use_warmup=True, device="cpu" if variant == "stalled" else None)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs * steps, warmup_t=20, warmup_lr_init=1e-6, t_in_epochs=False)
    pictures, updates, rng = Pictures(size(2048, 8)), 0, np.random.default_rng(0)
    for epoch in range(epochs):
        model.train()
        losses = torch.zeros((), device=DEVICE)
        for images, labels in pictures.epoch(steps):
            with torch.no_grad():
                weight = float(rng.beta(0.8, 0.8))
                images = images.lerp(images.flip(0), 1 - weight)
                targets = F.one_hot(labels, CLASSES).float()
                targets = targets.lerp(targets.flip(0), 1 - weight)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), targets, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            updates += 1
            scheduler.step_update(updates)
            average.update(model, step=updates)
            losses += loss.detach()
        shown = average.module.to(DEVICE).eval()
        accuracy = validate(shown, pictures, 4)
        if variant == "stalled":
            average.module.to("cpu")
        print(f"epoch {epoch}: loss {losses.item() / steps:.3f}, accuracy of the average {accuracy:.4f}")


if __name__ == "__main__":
    run(main)
