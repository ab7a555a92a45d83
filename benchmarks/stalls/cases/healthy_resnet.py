"""Image training as it should be: enough workers, images that travel as bytes from pinned memory, one step ahead."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from models import STEPS, resnet, run, size

BATCH, EDGE = size(256, 4), size(176, 32)


class Bytes(Dataset):
    def __len__(self):
        return (STEPS + 8) * BATCH

    def __getitem__(self, index):
        return torch.full((3, EDGE, EDGE), index % 256, dtype=torch.uint8), index % 1000


def main(tick, fixed=False):
    loader = DataLoader(Bytes(), batch_size=BATCH, num_workers=size(8, 1), pin_memory=True, prefetch_factor=4)
    model = resnet(width=96, blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
    side, current, batches = torch.cuda.Stream(), torch.cuda.current_stream(), iter(loader)

    def fetch():
        batch = next(batches)
        with torch.cuda.stream(side):
            return [tensor.to("cuda", non_blocking=True) for tensor in batch]

    ahead = fetch()
    for step in range(STEPS):
        current.wait_stream(side)
        x, y = ahead
        x.record_stream(current), y.record_stream(current)
        ahead = fetch()
        x = x.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
