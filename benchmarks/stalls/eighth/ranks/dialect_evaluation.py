"""How well villages are told by their dialect: a finished net hears test recordings on every rank, and the first rank keeps the score."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from job import CUDA, DEVICE, run


class Listener(nn.Module):
    def __init__(self, wide, layers, villages, bands=80):
        super().__init__()
        self.enter = nn.Conv1d(bands, wide, 3, 2, 1)
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 64), 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(wide), enable_nested_tensor=False)
        self.head = nn.Linear(wide, villages)

    def forward(self, frames):
        return self.head(self.body(self.enter(frames).mT).mean(1))


class Scores:
    """Ranks of the right village, worked out where all answers meet."""

    def __init__(self):
        self.places = []

    def add(self, said, right):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {"said": said.float().cpu().numpy(), "right": right.cpu().numpy()})
        if dist.get_rank() == 0:
            for part in gathered:
                order = np.argsort(-part["said"], axis=1)
                self.places.append(np.argmax(order == part["right"][:, None], axis=1))

    def all(self):
        return np.concatenate(self.places) if self.places else None


class ScoresOnDevice(Scores):
    def add(self, said, right):
        said = said.float()
        self.places.append((said > said.gather(1, right[:, None])).sum(1))

    def all(self):
        mine = torch.cat(self.places)
        everyone = mine.new_empty(dist.get_world_size() * len(mine))
        dist.all_gather_into_tensor(everyone, mine)
        return everyone.cpu().numpy()


def recordings(count, batch, frames, rank):
    chance = torch.Generator(DEVICE).manual_seed(rank)
    for _ in range(count):
        yield torch.randn(batch, 80, frames, device=DEVICE, generator=chance)


@torch.inference_mode()
def main(args):
    net = Listener(args.width, args.layers, args.villages).to(DEVICE).eval()
    scores = ScoresOnDevice() if args.fixed else Scores()
    chance = torch.Generator(DEVICE).manual_seed(100 + dist.get_rank())
    for frames in recordings(args.steps, args.batch, args.frames, dist.get_rank()):
        right = torch.randint(0, args.villages, (args.batch,), device=DEVICE, generator=chance)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16 if CUDA else None, enabled=CUDA):
            said = net(frames)
        scores.add(said, right)
    places = scores.all()
    if dist.get_rank() == 0:
        print(f"{len(places)} recordings: first {np.mean(places == 0):.4f}, among ten {np.mean(places < 10):.4f}, mean inverse {np.mean(1 / (1 + places)):.5f}")


if __name__ == "__main__":
    run(main, steps=70, batch=256, frames=400, width=768, layers=12, villages=8192)
