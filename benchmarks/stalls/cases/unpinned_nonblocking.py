"""`non_blocking=True` from pageable memory: it looks asynchronous, and the host copies image and mask by hand all the same."""
import torch
import torch.nn.functional as F

from models import STEPS, UNet, prefetch, run, size


def main(tick, fixed=False):
    batch, edge = size(32, 2), size(256, 16)
    data = [(torch.randn(batch, 3, edge, edge), torch.randint(0, 19, (batch, edge, edge))) for _ in range(4)]
    model = UNet(width=32, outputs=19).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    ahead = prefetch(data) if fixed else None
    for step in range(STEPS):
        if fixed:
            image, mask = next(ahead)
        else:
            image, mask = (tensor.to("cuda", non_blocking=True) for tensor in data[step % 4])  # STALL: blocking_copy
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(image.to(memory_format=torch.channels_last)), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
