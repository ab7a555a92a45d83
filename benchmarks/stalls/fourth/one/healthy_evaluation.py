"""A large ViT is evaluated; the number of right answers is read after every batch, which costs nothing where a batch takes so long."""
import torch
from script import DEVICE, run, turns

from models import ViT, size

BATCH, EDGE = size(160, 2), size(224, 32)


@torch.inference_mode()
def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = ViT(width=1024, layers=24, heads=16).eval()
        images = torch.randint(0, 256, (16 * BATCH, 3, EDGE, EDGE), dtype=torch.uint8)
        labels = torch.randint(0, 1000, (16 * BATCH,))
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    right, seen = torch.zeros((), dtype=torch.long, device=DEVICE) if fixed else 0, 0
    for batch in range(turns(160, 2)):
        here = slice(batch % 16 * BATCH, (batch % 16 + 1) * BATCH)
        x = (images[here].float() / 255 - mean) / deviation
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            answers = model(x).argmax(1)
        correct = (answers == labels[here]).sum()
        right += correct if fixed else correct.item()
        seen += BATCH
        tick()
    assert 0 <= float(right) / seen <= 1


if __name__ == "__main__":
    run(main)
