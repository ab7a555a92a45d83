"""A masked autoencoder in good order: enough workers, pinned memory, numbers read every 50 steps, the device awaited when it is timed."""
import time

import torch
from script import DEVICE, run, synchronize, turns
from torch.utils.data import DataLoader, Dataset
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from models import size

BATCH, EDGE = size(256, 2), size(224, 32)


class Pictures(Dataset):
    def __init__(self, count):
        self.count, self.kept = count, torch.randint(0, 256, (256, 3, EDGE, EDGE), dtype=torch.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        picture = self.kept[index % 256]
        return picture.flip(2) if index // 256 % 2 else picture


def main(tick, fixed=False):
    torch.manual_seed(0)
    steps = turns(130, 2)
    model = ViTMAEForPreTraining(ViTMAEConfig(
        hidden_size=size(768, 32), num_hidden_layers=size(12, 2), num_attention_heads=size(12, 2), intermediate_size=size(3072, 64), image_size=EDGE,
        patch_size=size(16, 8), decoder_hidden_size=size(512, 32), decoder_num_hidden_layers=size(8, 1), decoder_num_attention_heads=size(16, 2),
        decoder_intermediate_size=size(2048, 64), mask_ratio=0.5,
    )).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=DEVICE == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-4, total_steps=steps + 1)
    loader = DataLoader(Pictures(BATCH * steps), BATCH, shuffle=True, num_workers=size(12, 1), pin_memory=DEVICE == "cuda", drop_last=True)
    speeds, start = [], time.perf_counter()
    for step, images in enumerate(loader):
        x = images.to(DEVICE, non_blocking=True).float().div_(127.5).sub_(1)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(pixel_values=x).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 and not fixed:
            synchronize()
            speeds.append((50 * BATCH / (time.perf_counter() - start), loss.item()))
            start = time.perf_counter()
        tick()


if __name__ == "__main__":
    run(main)
