"""FixMatch: few labelled pictures and many without labels, from two loaders; the labelled one starts anew whenever it ends."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import DEVICE, run, size, turns
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

LABELLED, UNLABELLED, KEPT, CLASSES, SURE = size(64, 2), size(192, 4), size(1024, 8), 10, 0.95
WEAK = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(32, 4, padding_mode="reflect")])
STRONG = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(32, 4, padding_mode="reflect"), v2.RandAugment(1, 10), v2.RandomErasing(0.5, value=127)])


class Pictures(Dataset):
    def __init__(self, count, views):
        self.pictures = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
        self.labels, self.views = torch.randint(0, CLASSES, (count,)), views

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return [view(self.pictures[index]) for view in self.views], self.labels[index]


class Endless(Sampler):
    """One permutation after the other."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        while True:
            yield from torch.randperm(self.count).tolist()


class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(inner), nn.BatchNorm2d(outer)
        self.one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False) if inner != outer else nn.Identity()

    def forward(self, x):
        y = F.leaky_relu(self.first(x), 0.1)
        return self.short(x) + self.two(F.leaky_relu(self.second(self.one(y)), 0.1))


def wide_resnet(deep, wide):
    widths, layers = [16, 16 * wide, 32 * wide, 64 * wide], [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    for stage in range(3):
        for place in range(deep):
            layers.append(Block(widths[stage] if place == 0 else widths[stage + 1], widths[stage + 1], 2 if stage and place == 0 else 1))
    return nn.Sequential(*layers, nn.BatchNorm2d(widths[3]), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], CLASSES))


def main(variant):
    cuda, steps = DEVICE == "cuda", turns(230, 6)
    torch.backends.cudnn.benchmark = True
    common = dict(pin_memory=cuda, drop_last=True)
    few = Pictures(KEPT, [WEAK])
    labelled = DataLoader(few, LABELLED, num_workers=size(4, 1), **common, **(dict(sampler=Endless(KEPT)) if variant == "fixed" else dict(shuffle=True)))
    many = Pictures(UNLABELLED * (steps + 1), [WEAK, STRONG])
    unlabelled = DataLoader(many, UNLABELLED, shuffle=True, num_workers=size(11, 1), prefetch_factor=4, **common)
    model = wide_resnet(size(4, 1), size(8, 1)).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    seen, used = iter(labelled), torch.zeros((), device=DEVICE)
    for step, ((weak, strong), _) in zip(range(steps), unlabelled):
        try:
            (pictures,), labels = next(seen)
        except StopIteration:
            seen = iter(labelled)
            (pictures,), labels = next(seen)
        x = torch.cat([part.to(DEVICE, non_blocking=True) for part in (pictures, weak, strong)])
        x = (x.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            known, easy, hard = model(x).float().split([LABELLED, UNLABELLED, UNLABELLED])
        supervised = F.cross_entropy(known, labels.to(DEVICE, non_blocking=True))
        confidence, guessed = easy.detach().softmax(1).max(1)
        mask = (confidence > SURE).float()
        loss = supervised + (F.cross_entropy(hard, guessed, reduction="none") * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        used += mask.mean()
    print(f"loss {loss.item():.4f}, share of guesses used {used.item() / steps:.3f}")


if __name__ == "__main__":
    run(main)
