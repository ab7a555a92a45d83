"""Two faults in one step: images come from pageable memory, and the score of each class is read on its own."""
import torch
import torch.nn.functional as F

from models import STEPS, UNet, prefetch, run, size

CLASSES = size(19, 3)


def main(tick, fixed=False):
    batch, edge = size(48, 2), size(192, 16)
    data = [(torch.randn(batch, 3, edge, edge), torch.randint(0, CLASSES, (batch, edge, edge))) for _ in range(3)]
    model = UNet(width=48, outputs=CLASSES).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ahead, seen = prefetch(data) if fixed else None, torch.zeros(CLASSES, device="cuda")
    scores = [0.0] * CLASSES
    for step in range(STEPS):
        if fixed:
            image, mask = next(ahead)
        else:
            image, mask = (tensor.to("cuda") for tensor in data[step % 3])  # STALL: blocking_copy
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(image.to(memory_format=torch.channels_last))
            loss = F.cross_entropy(out, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        guess = out.detach().argmax(1)
        for number in range(CLASSES):
            mine, truth = guess == number, mask == number
            score = (mine & truth).sum() / (mine | truth).sum().clamp(min=1)
            if fixed:
                seen[number] += score
            else:
                scores[number] += score.item()  # STALL: host_sync
        tick()


if __name__ == "__main__":
    run(main)
