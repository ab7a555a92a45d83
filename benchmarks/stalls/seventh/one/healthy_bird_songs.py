"""Bird songs told apart without labels: two crops of a recording shall look alike to a ResNet; mel pictures made on the device, accelerate, four pieces to an update."""
import argparse
import math
import time

import torch
import torch.nn.functional as F
import torchaudio
from accelerate import Accelerator
from torchvision.models import resnet18, resnet50


class Songs(torch.nn.Module):
    def __init__(self, net, rate):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(rate, n_fft=1024, hop_length=320, n_mels=128)
        self.net = net

    def forward(self, crops):
        with torch.no_grad(), torch.autocast(crops.device.type, enabled=False):
            pictures = torch.log1p(100 * self.mel(crops))[:, None]
            pictures = (pictures - pictures.mean((2, 3), keepdim=True)) / (pictures.std((2, 3), keepdim=True) + 1e-5)
        return F.normalize(self.net(pictures.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)).float(), dim=1)


def recordings(count, long, device):
    """Chirps over noise, as 16-bit numbers."""
    kept = torch.empty(count, long, dtype=torch.int16, device=device)
    times = torch.arange(long, device=device) / 32000
    for some in kept.split(64):
        pitch = 1500 + 4000 * torch.rand(len(some), 1, device=device)
        song = torch.sin(6.283 * times * pitch + 30 * torch.sin(times * pitch / 300))
        some.copy_(8000 * song + 1500 * torch.randn_like(song))
    return kept


def crops(kept, rows, long):
    firsts = torch.randint(0, kept.shape[1] - long + 1, (len(rows), 1), device=kept.device)
    return kept[rows[:, None], firsts + torch.arange(long, device=kept.device)].float() / 32768


def alike(one, other, warmth=0.1):
    scores = torch.cat([one, other]) @ torch.cat([one, other]).mT / warmth
    scores.fill_diagonal_(-torch.inf)
    count = len(one)
    wanted = torch.arange(2 * count, device=one.device).roll(count)
    return F.cross_entropy(scores, wanted)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=200)
    options = parser.parse_args()
    count, long, crop, batch = (16, 16000, 8000, 4) if options.tiny else (2048, 160_000, 81_600, 320)
    torch.manual_seed(0)
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    device = accelerator.device
    net = (resnet18 if options.tiny else resnet50)(weights=None, num_classes=128)
    model = Songs(net, 32000).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=device.type == "cuda")
    model, optimizer = accelerator.prepare(model, optimizer)
    kept = recordings(count, long, device)
    total, norm = 0.0, torch.zeros((), device=device)
    for turn in range(options.turns):
        rows = torch.randint(0, count, (batch,), device=device)
        with accelerator.accumulate(model):
            features = model(torch.cat([crops(kept, rows, crop), crops(kept, rows, crop)]))
            loss = alike(*features.chunk(2))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if options.fixed:
            total = total + loss.detach()
        else:
            total += loss.item()
            if not math.isfinite(total):
                raise FloatingPointError(f"turn {turn}")
        if turn % 40 == 39:
            print(f"{turn + 1}: loss {float(total) / (turn + 1):.4f}, length of the gradient {float(norm):.3f}")
    print(f"loss {float(total) / options.turns:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
