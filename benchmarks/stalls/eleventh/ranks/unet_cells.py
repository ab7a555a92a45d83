"""U-Net for cell segmentation, DDP. Validation with test-time flips after each epoch."""
import os
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"

SIDE = 32 if SMALL else 128
BASE = 8 if SMALL else 64
BATCH = 4 if SMALL else 32
TRAIN = 32 if SMALL else 2560        # per rank
VALID = 24 if SMALL else 2880        # the common validation set
EPOCHS = 2 if SMALL else 4
CLASSES = 3


def conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.GroupNorm(8, cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.GroupNorm(8, cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, b=BASE):
        super().__init__()
        chans = [b, 2 * b, 4 * b, 8 * b]
        self.down = nn.ModuleList(conv(i, o) for i, o in zip([1] + chans[:-1], chans))
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, 2) for i, o in zip(chans[:0:-1], chans[-2::-1]))
        self.merge = nn.ModuleList(conv(2 * o, o) for o in chans[-2::-1])
        self.head = nn.Conv2d(b, CLASSES, 1)

    def forward(self, x):
        skips = []
        for i, stage in enumerate(self.down):
            x = stage(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def make_cells(n, seed, device):
    """Smooth noise, cut at two levels: background, cell, nucleus."""
    g = torch.Generator(device=device).manual_seed(seed)
    coarse = torch.randn(n, 1, SIDE // 8, SIDE // 8, generator=g, device=device)
    field = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
    mask = (field[:, 0] > 0.3).long() + (field[:, 0] > 0.8).long()
    image = field + 0.5 * torch.randn(field.shape, generator=g, device=device)
    return image, mask


class Trainer:
    def __init__(self, device, local):
        self.device, self.rank, self.world = device, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        with device:
            self.net = UNet()
        self.ddp = nn.parallel.DistributedDataParallel(
            self.net, device_ids=[local] if device.type == "cuda" else None, gradient_as_bucket_view=True)
        self.opt = torch.optim.SGD(self.ddp.parameters(), lr=0.02, momentum=0.9, nesterov=True)
        self.train_set = make_cells(TRAIN, 10 + self.rank, device)
        self.valid_set = make_cells(VALID, 99, device)
        self.out = os.path.join(tempfile.mkdtemp(), "unet.pt")

    def amp(self):
        return torch.autocast(self.device.type, torch.bfloat16)

    def train_epoch(self):
        self.net.train()
        losses = []
        for idx in torch.randperm(TRAIN, device=self.device).split(BATCH):
            image, mask = self.train_set[0][idx], self.train_set[1][idx]
            with self.amp():
                logits = self.ddp(image)
            loss = F.cross_entropy(logits.float(), mask)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def evaluate(self, first, stride):
        """Intersection and union per class over every stride-th batch, four flips averaged."""
        self.net.eval()
        inter, union = (torch.zeros(CLASSES, device=self.device) for _ in range(2))
        for s in range(first * BATCH, VALID, stride * BATCH):
            image, mask = self.valid_set[0][s:s + BATCH], self.valid_set[1][s:s + BATCH]
            prob = 0
            for dims in ([], [2], [3], [2, 3]):
                with self.amp():
                    y = self.net(image.flip(dims))
                prob = prob + y.float().softmax(1).flip(dims)
            hot = F.one_hot(prob.argmax(1), CLASSES).bool()
            true = F.one_hot(mask, CLASSES).bool()
            inter += (hot & true).sum((0, 1, 2))
            union += (hot | true).sum((0, 1, 2))
        return torch.stack([inter, union])

    def validate(self):
        counts = torch.zeros(2, CLASSES, device=self.device)
        if FIXED:
            counts = self.evaluate(self.rank, self.world)
        elif self.rank == 0:
            counts = self.evaluate(0, 1)  # FAULT
        dist.all_reduce(counts)
        return (counts[0] / counts[1].clamp(min=1)).mean().item()

    def save(self):
        state = {k: v.to("cpu") for k, v in self.net.state_dict().items()}
        threading.Thread(target=torch.save, args=(state, self.out)).start()

    def fit(self):
        best = -1.0
        for epoch in range(EPOCHS):
            tick = time.time()
            loss = self.train_epoch()
            iou = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f} mIoU {iou:.4f} ({time.time() - tick:.2f} s)", flush=True)
                if iou > best:
                    best = iou
                    self.save()


def main():
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    t0 = time.perf_counter()
    Trainer(device, local).fit()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print("RUN_SECONDS %.3f" % (time.perf_counter() - t0), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
