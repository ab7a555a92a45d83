"""Active learning: which galaxies should people label next? Those farthest from all that were labelled, round after round, with training in between."""
import argparse
import time

import numpy as np
import timm
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = 10


class Sky:
    """All pictures, on the device, and which of them have labels by now."""

    def __init__(self, count, edge, labelled):
        chance = torch.Generator(DEVICE).manual_seed(0)
        self.shapes = torch.randint(0, SHAPES, (count,), device=DEVICE, generator=chance)
        coarse = torch.randint(0, 200, (SHAPES, 3, edge // 8, edge // 8), dtype=torch.uint8, device=DEVICE, generator=chance)
        self.pictures = torch.randint(0, 56, (count, 3, edge, edge), dtype=torch.uint8, device=DEVICE, generator=chance)
        for some in torch.arange(count, device=DEVICE).split(4096):
            self.pictures[some] += coarse[self.shapes[some]].repeat_interleave(8, 2).repeat_interleave(8, 3)
        self.chosen = list(range(labelled))

    def some(self, rows):
        return self.pictures[rows].to(memory_format=torch.channels_last).float().sub(120).div(60)


def train(model, sky, batch, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=DEVICE == "cuda")
    chance, total = torch.Generator().manual_seed(len(sky.chosen)), torch.zeros((), device=DEVICE)
    chosen = torch.tensor(sky.chosen)
    model.train()
    for _ in range(steps):
        rows = chosen[torch.randint(0, len(chosen), (batch,), generator=chance)]
        rows = rows.pin_memory().to(DEVICE, non_blocking=True) if DEVICE == "cuda" else rows
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            said = model(sky.some(rows))
        loss = F.cross_entropy(said.float(), sky.shapes[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / steps


@torch.inference_mode()
def features(model, sky, batch):
    """What the net sees in each picture."""
    model.eval()
    seen = []
    for rows in torch.arange(len(sky.pictures), device=DEVICE).split(batch):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            seen.append(model.forward_head(model.forward_features(sky.some(rows)), pre_logits=True).float())
    return torch.cat(seen)


def farthest(seen, chosen, count):
    """Greedy k-centres: each new one is the farthest from all that are chosen."""
    seen = seen.cpu().numpy()  # STALL: blocking_copy
    nearest = np.full(len(seen), np.inf, np.float32)
    for one in chosen[-16:]:
        nearest = np.minimum(nearest, np.linalg.norm(seen - seen[one], axis=1))  # STALL: host_work
    found = []
    for _ in range(count):
        one = int(nearest.argmax())
        found.append(one)
        nearest = np.minimum(nearest, np.linalg.norm(seen - seen[one], axis=1))  # STALL: host_work
    return found


def farthest_on_device(seen, chosen, count):
    nearest = torch.cdist(seen, seen[chosen[-16:]]).amin(1)
    found = []
    for _ in range(count):
        one = nearest.argmax().view(1)
        found.append(one)
        nearest = torch.minimum(nearest, (seen - seen.index_select(0, one)).norm(dim=1))
    return torch.cat(found).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    count, edge, batch, steps, new, rounds = (120, 32, 8, 3, 4, 2) if options.tiny else (20000, 128, 256, 160, 48, options.rounds)
    torch.manual_seed(0)
    start = time.perf_counter()
    sky = Sky(count, edge, labelled=min(count // 4, 512))
    model = timm.create_model("resnet34", num_classes=SHAPES).to(DEVICE, memory_format=torch.channels_last)
    for number in range(rounds):
        loss = train(model, sky, batch, steps)
        found = (farthest_on_device if options.fixed else farthest)(features(model, sky, 2 * batch), sky.chosen, new)
        sky.chosen += found
        print(f"round {number + 1}: mean loss {loss.item():.4f}, {len(set(sky.chosen))} labelled", flush=True)
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
