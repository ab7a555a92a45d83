"""fp16 with a GradScaler: `scaler.step` asks the GPU whether a gradient overflowed before it starts an unfused optimizer."""
import torch
import torch.nn.functional as F

from models import STEPS, resnet, run, size


def main(tick, fixed=False):
    model = resnet(width=96, blocks=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fixed)  # the fused one takes the answer on the device
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(size(256, 2), 3, size(192, 32), size(192, 32), device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, x.shape[:1], device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # STALL: host_sync
        scaler.update()
        tick()


if __name__ == "__main__":
    run(main)
