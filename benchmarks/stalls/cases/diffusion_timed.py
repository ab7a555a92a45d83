"""A diffusion step timed with events; `end.synchronize()` comes before the host prepares the next images, so the two take turns."""
import numpy as np
import torch
import torch.nn.functional as F

from models import STEPS, UNet, run, size

BATCH, EDGE = size(64, 2), size(128, 16)


def augment(images, random):
    """Crops, mirrors and scales on the host: several milliseconds."""
    across, mirrored = random.integers(0, 8), random.integers(0, 2)
    images = np.roll(images, across, axis=3)[..., :: -1 if mirrored else 1]
    return torch.from_numpy(images.astype(np.float32) / 127.5 - 1).pin_memory()


def main(tick, fixed=False):
    random = np.random.default_rng(0)
    pictures = random.integers(0, 255, (BATCH, 3, EDGE, EDGE), dtype=np.uint8)
    model = UNet(width=64).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    alphas = torch.cos(torch.linspace(0, 1.5, 1000, device="cuda")).square()
    times, waiting = [], None
    for step in range(STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        clean = augment(pictures, random).to("cuda", non_blocking=True)
        noise = torch.randn_like(clean)
        alpha = alphas[torch.randint(0, 1000, (BATCH, 1, 1, 1), device="cuda")]
        noisy = (alpha.sqrt() * clean + (1 - alpha).sqrt() * noise).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(noisy).float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end.record()
        if fixed:  # read one step late, when it has long passed
            if waiting is not None and waiting[1].query():
                times.append(waiting[0].elapsed_time(waiting[1]))
            waiting = start, end
        else:
            end.synchronize()  # STALL: host_sync
            times.append(start.elapsed_time(end))
        tick()


if __name__ == "__main__":
    run(main)
