"""The copy has a stream of its own, but the next line waits for it, so it still stands in front of the step's kernels."""
import torch
import torch.nn.functional as F

from models import STEPS, ViT, prefetch, run, size


def main(tick, fixed=False):
    batch, edge = size(256, 2), size(224, 32)
    images = [torch.rand(batch, 3, edge, edge) for _ in range(3)]
    with torch.device("cuda"):
        model = ViT(width=384, layers=3, heads=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    y = torch.randint(0, 1000, (batch,), device="cuda")
    if fixed:
        ahead = prefetch([(image,) for image in images])
    else:
        images = [image.pin_memory() for image in images]
        copies = torch.cuda.Stream()
    for step in range(STEPS):
        if fixed:
            x, = next(ahead)
        else:
            copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                x = images[step % 3].to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(copies)  # STALL: copy_not_overlapped
            x.record_stream(torch.cuda.current_stream())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
