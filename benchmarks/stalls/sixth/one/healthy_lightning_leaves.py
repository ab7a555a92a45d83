"""Diseases of leaves by a ConvNeXt from timm, fitted with Lightning; the loss of every step is kept for a plot, which a step so long does not feel."""
import argparse
import logging
import time
import warnings

import lightning
import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

DISEASES = 38


class Leaves(Dataset):
    """Pictures that were shrunk beforehand and lie in memory as bytes."""

    def __init__(self, count, edge):
        chance = torch.Generator().manual_seed(0)
        self.count, self.diseases = count, torch.randint(0, DISEASES, (count,), generator=chance)
        self.pictures = torch.randint(0, 256, (min(count, 512), 3, edge, edge), generator=chance, dtype=torch.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        picture = self.pictures[index % len(self.pictures)]
        return (picture.flip(2) if index % 2 else picture), self.diseases[index]


class Diagnosis(lightning.LightningModule):
    def __init__(self, name, keep_floats):
        super().__init__()
        self.net = timm.create_model(name, pretrained=False, num_classes=DISEASES, drop_path_rate=0.1)
        self.mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=DISEASES)
        self.accuracy, self.keep_floats, self.losses = MulticlassAccuracy(DISEASES, average="micro", validate_args=False), keep_floats, []
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255, persistent=False)

    def forward(self, pictures):
        return self.net(((pictures.float() - self.mean) / 58).contiguous(memory_format=torch.channels_last))

    def training_step(self, batch):
        pictures, diseases = batch
        pictures, wanted = self.mixup(pictures.float(), diseases)
        loss = torch.sum(-wanted * F.log_softmax(self(pictures).float(), -1), -1).mean()
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item() if self.keep_floats else loss.detach())
        return loss

    def validation_step(self, batch):
        pictures, diseases = batch
        self.accuracy.update(self(pictures), diseases)

    def on_validation_epoch_end(self):
        self.log("accuracy", self.accuracy.compute(), prog_bar=True)
        self.accuracy.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4, weight_decay=0.05, fused=self.device.type == "cuda")
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=self.trainer.max_steps)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--turns", type=int, default=210)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--edge", type=int, default=224)
    parser.add_argument("--net", default="convnext_tiny")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    start = time.perf_counter()
    cuda = torch.cuda.is_available()
    common = dict(batch_size=options.batch, num_workers=8 if cuda else 1, pin_memory=cuda, persistent_workers=True, drop_last=True)
    training = DataLoader(Leaves(options.batch * options.turns, options.edge), shuffle=True, **common)
    validation = DataLoader(Leaves(options.batch * 8, options.edge), **common)
    model = Diagnosis(options.net, keep_floats=not options.fixed).to(memory_format=torch.channels_last)
    trainer = lightning.Trainer(
        max_steps=options.turns, precision="bf16-mixed", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
        num_sanity_val_steps=0, val_check_interval=max(options.turns // 2, 1),
    )
    trainer.fit(model, training, validation)
    print(f"loss {float(sum(model.losses)) / len(model.losses):.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
