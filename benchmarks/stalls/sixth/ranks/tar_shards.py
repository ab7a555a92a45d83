"""A ResNet under DDP that reads pictures from tar shards, some packed small and some large."""
import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.models import resnet18, resnet50

SHARDS = [64] * 12 + [384] * 2  # how many pictures lie in each: twelve of last year's export, two of this year's


def write_shards(folder, edge):
    rng = np.random.default_rng(0)
    packed = []
    for _ in range(48):
        coarse = Image.fromarray(rng.integers(0, 256, (edge // 16, edge // 16, 3), dtype=np.uint8))
        packed.append(io.BytesIO())
        coarse.resize((edge, edge), Image.Resampling.BICUBIC).save(packed[-1], "jpeg", quality=88)
    for number, count in enumerate(SHARDS):
        with tarfile.open(folder / f"{number:02}.tar", "w") as tar:
            for place in range(count):
                picture = packed[rng.integers(len(packed))].getvalue()
                entry = tarfile.TarInfo(f"{place:04}_{rng.integers(100)}.jpg")
                entry.size = len(picture)
                tar.addfile(entry, io.BytesIO(picture))


class Shards(IterableDataset):
    """Pictures of the given shards, over and over. A worker has shards of its own, or with `interleaved` every n-th picture."""

    def __init__(self, paths, edge, interleaved):
        self.paths, self.edge, self.interleaved = paths, edge, interleaved

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        paths = self.paths if self.interleaved else self.paths[number::workers]
        rng = np.random.default_rng(number)
        while paths:
            for path in paths:
                with tarfile.open(path) as tar:
                    for place, entry in enumerate(tar):
                        if not self.interleaved or place % workers == number:
                            yield self.sample(tar.extractfile(entry).read(), rng), int(entry.name[5:-4])

    def sample(self, packed, rng):
        picture = Image.open(io.BytesIO(packed)).convert("RGB")
        side = int(rng.integers(picture.width // 2, picture.width))
        left, top = rng.integers(0, picture.width - side + 1, 2).tolist()
        picture = picture.resize((self.edge, self.edge), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def main(args):
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    if rank == 0:
        write_shards(folder, args.edge + args.edge // 4)
    dist.barrier()
    paths = sorted(folder.glob("*.tar"))
    mine = paths[:12] if rank == 0 else paths[12:]  # as many pictures for either rank
    loader = DataLoader(Shards(mine, args.edge, args.fixed), args.batch, num_workers=args.workers, pin_memory=CUDA, drop_last=True)
    net = (resnet18 if args.edge < 64 else resnet50)().to(DEVICE, memory_format=torch.channels_last)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    for step, (images, labels) in zip(range(args.steps), loader):
        images, labels = images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        images = ((images.float() - 118) / 60).contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        print(f"last loss {loss.item():.3f}")


if __name__ == "__main__":
    run(main, steps=170, batch=64, edge=224, workers=12)
