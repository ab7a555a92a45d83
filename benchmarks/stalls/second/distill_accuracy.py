"""A small net learns from a large one; the batch's right answers are counted into a Python integer before the next crops are cut."""

import numpy as np
import torch
import torch.nn.functional as F

from models import STEPS, resnet, run, size

BATCH, EDGE, ROOM = size(128, 2), size(160, 32), size(32, 4)


def crops(images, random):
    """A random crop of each, half of them mirrored, half with another contrast from a table."""
    batch = np.empty((BATCH, 3, EDGE, EDGE), np.uint8)
    for index, image in enumerate(images):
        down, across = random.integers(0, ROOM, 2)
        image = image[:, down : down + EDGE, across : across + EDGE]
        if random.random() < 0.5:
            image = image[:, :, ::-1]
        if random.random() < 0.5:
            image = np.clip(np.arange(256) * random.uniform(0.8, 1.2), 0, 255).astype(np.uint8)[image]
        batch[index] = image
    return torch.from_numpy(batch).pin_memory()


def main(tick, fixed=False):
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (BATCH, 3, EDGE + ROOM, EDGE + ROOM), dtype=np.uint8)
    teacher, student = resnet(width=320, classes=100).eval(), resnet(width=96, classes=100)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    y = torch.randint(0, 100, (BATCH,), device="cuda")
    correct = torch.zeros((), dtype=torch.long, device="cuda") if fixed else 0
    for step in range(STEPS):
        x = crops(images, random).to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = (x.to(torch.bfloat16) / 127.5 - 1).to(memory_format=torch.channels_last)
            with torch.no_grad():
                wanted = F.softmax(teacher(x) / 4, dim=1)
            out = student(x)
            loss = F.kl_div(F.log_softmax(out / 4, dim=1), wanted, reduction="batchmean") + F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fixed:
            correct += (out.argmax(1) == y).sum()
        else:
            correct += (out.argmax(1) == y).sum().item()  # STALL: host_sync
        tick()
    print(f"accuracy {int(correct) / STEPS / BATCH:.3f}")


if __name__ == "__main__":
    run(main)
