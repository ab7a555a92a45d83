"""Evaluation of a segmentation net: each batch of predicted masks is taken home as int64 and made small there."""
import torch

from models import STEPS, UNet, run, size


@torch.inference_mode()
def main(tick, fixed=False):
    model = UNet(width=48, outputs=19).to("cuda", memory_format=torch.channels_last).eval()
    side = size(192, 16)
    images = torch.randn(size(64, 2), 3, side, side, device="cuda").to(memory_format=torch.channels_last)
    if fixed:
        home = torch.empty(STEPS, len(images), side, side, dtype=torch.uint8, pin_memory=True)
    predictions = []
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            masks = model(images).argmax(1)
        if fixed:
            home[step].copy_(masks.to(torch.uint8), non_blocking=True)
        else:
            predictions.append(masks.cpu().numpy().astype("uint8"))  # STALL: blocking_copy
        tick()


if __name__ == "__main__":
    run(main)
