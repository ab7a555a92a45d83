"""What is written on ballots, with Lightning on two ranks: how many of each sign were read rightly is logged for all ranks together in each step."""
import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run

SIGNS = 12
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Ballots(Dataset):
    """Batches that are on the device already; each sign is a pattern of its own under noise."""

    def __init__(self, steps, batch, edge, rank):
        like = torch.randn(SIGNS, 1, edge, edge, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(7))
        chance = torch.Generator(DEVICE).manual_seed(rank)
        self.steps, self.signs = steps, torch.randint(0, SIGNS, (4, batch), device=DEVICE, generator=chance)
        self.pictures = like[self.signs] + 2 * torch.randn(4, batch, 1, edge, edge, device=DEVICE, generator=chance)

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        return self.pictures[index % 4], self.signs[index % 4]


class Reader(lightning.LightningModule):
    def __init__(self, patch, edge, wide, deep):
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, wide, patch, patch), nn.Parameter(0.02 * torch.randn((edge // patch) ** 2, wide))
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 64), 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, deep, enable_nested_tensor=False)
        self.head = nn.Linear(wide, SIGNS)
        self.total = None

    def forward(self, pictures):
        return self.head(self.body(self.patches(pictures).flatten(2).mT + self.places).mean(1))

    def training_step(self, batch):
        pictures, signs = batch
        said = self(pictures).float()
        loss = F.cross_entropy(said, signs)
        self.tell(loss.detach(), said.detach().argmax(1), signs)
        return loss

    def tell(self, loss, said, signs):
        right = F.one_hot(signs, SIGNS).float() * (said == signs)[:, None]
        recall = right.sum(0) / F.one_hot(signs, SIGNS).sum(0).clamp(min=1)
        self.log("loss", loss, on_step=True, on_epoch=False, sync_dist=True)  # STALL: host_sync, exposed_collective
        for sign in range(SIGNS):
            self.log(f"recall/{sign}", recall[sign], on_step=True, on_epoch=False, sync_dist=True)  # STALL: host_sync, exposed_collective

    def mean_loss(self):
        return self.trainer.callback_metrics["loss"].item()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=CUDA)


class ReaderOnce(Reader):
    """Adds up on the device; the ranks tell each other once an epoch."""

    def tell(self, loss, said, signs):
        hot = F.one_hot(signs, SIGNS).float()
        news = torch.cat([loss.view(1), (hot * (said == signs)[:, None]).sum(0), hot.sum(0)])
        self.total = news if self.total is None else self.total + news

    def on_train_epoch_end(self):
        dist.all_reduce(self.total)
        self.log("loss", self.total[0] / dist.get_world_size() / self.trainer.num_training_batches)
        self.log_dict({f"recall/{sign}": share for sign, share in enumerate(self.total[1 : SIGNS + 1] / self.total[SIGNS + 1 :].clamp(min=1))})


def main(args):
    module = (ReaderOnce if args.fixed else Reader)(args.patch, args.edge, args.width, args.layers)
    loader = DataLoader(Ballots(args.steps, args.batch, args.edge, dist.get_rank()), None)
    how = {"accelerator": "gpu" if CUDA else "cpu", "devices": dist.get_world_size(), "strategy": "ddp", "precision": "bf16-mixed" if CUDA else "32-true"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, use_distributed_sampler=False, **how, **quiet)
    trainer.fit(module, loader)
    if dist.get_rank() == 0:
        print(f"loss {module.mean_loss():.4f}")


if __name__ == "__main__":
    run(main, steps=520, batch=128, edge=112, patch=8, width=512, layers=12)
