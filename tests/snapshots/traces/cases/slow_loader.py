"""A training script."""
import torch
from torch.utils.data import DataLoader, Dataset
from common import STEPS, conv_net, image_step, run, size


class Images(Dataset):
    def __len__(self):
        return (STEPS + 4) * size(64, 4)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, size(224, 32), size(224, 32), generator=generator)
        for _ in range(2):  # what an augmentation costs
            image = torch.nn.functional.avg_pool2d(image.unsqueeze(0), 3, 1, 1).squeeze(0)
        return image, index % 1000


def main(tick, fixed=False):
    torch.set_num_threads(1)
    workers = dict(num_workers=size(12, 2), pin_memory=True, persistent_workers=True, prefetch_factor=4) if fixed else {}
    loader = DataLoader(Images(), batch_size=size(64, 4), **workers)
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(loader):
        if step == STEPS:
            break
        image_step(model, optimizer, x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True))
        tick()


if __name__ == "__main__":
    run(main)
