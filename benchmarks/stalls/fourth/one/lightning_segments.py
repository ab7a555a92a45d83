"""A Lightning fit: streets are cut into 19 classes, and each class's overlap is followed in training and in validation."""
import warnings

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.utils.data import DataLoader, Dataset

from models import UNet, size

BATCH, EDGE, CLASSES = size(16, 2), size(256, 16), 19


class Streets(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.count = count
        self.images = torch.from_numpy(rng.integers(0, 256, (48, 3, EDGE, EDGE), dtype=np.uint8))
        coarse = torch.from_numpy(rng.integers(0, CLASSES, (48, 1, EDGE // 8, EDGE // 8), dtype=np.uint8))
        self.labels = F.interpolate(coarse, scale_factor=8)[:, 0]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.images[index % 48], self.labels[index % 48]


class Segmenter(lightning.LightningModule):
    def __init__(self, tick, counted, summed):
        super().__init__()
        self.net, self.tick, self.counted, self.summed = UNet(48, outputs=CLASSES), tick, counted, summed
        self.register_buffer("classes", torch.arange(CLASSES).view(-1, 1, 1, 1))
        self.register_buffer("seen", torch.zeros(2, CLASSES, dtype=torch.long))
        self.hits, self.unions, self.pairs, self.overlap = [0] * CLASSES, [0] * CLASSES, [], None

    def forward(self, images):
        return self.net((images.float() / 255).contiguous(memory_format=torch.channels_last))

    def overlaps(self, predicted, labels):
        """Hits and union of all classes at once, on the device."""
        is_predicted, is_label = predicted == self.classes, labels == self.classes
        return torch.stack([(is_predicted & is_label).sum((1, 2, 3)), (is_predicted | is_label).sum((1, 2, 3))])

    def training_step(self, batch):
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels.long())
        predicted = logits.detach().argmax(1)
        if self.counted:
            self.seen += self.overlaps(predicted, labels)
        else:
            for label in range(CLASSES):
                is_predicted, is_label = predicted == label, labels == label
                self.hits[label] += (is_predicted & is_label).sum().item()  # STALL: host_sync
                self.unions[label] += (is_predicted | is_label).sum().item()  # STALL: host_sync
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        self.tick()

    def validation_step(self, batch):
        images, labels = batch
        predicted = self(images).argmax(1)
        self.pairs.append(self.overlaps(predicted, labels) if self.summed else (predicted.cpu().numpy(), labels.cpu().numpy()))

    def on_validation_epoch_end(self):
        if self.summed:
            hits, unions = torch.stack(self.pairs).sum(0)
            self.overlap = (hits / unions.clamp(min=1)).mean()
        else:
            predicted, labels = (np.concatenate(part) for part in zip(*self.pairs))
            scores = []
            for label in range(CLASSES):
                hits = np.logical_and(predicted == label, labels == label).sum()  # STALL: host_work
                scores.append(hits / max(1, np.logical_or(predicted == label, labels == label).sum()))
            self.overlap = float(np.mean(scores))
        self.pairs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, fused=DEVICE == "cuda")
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(tick, fixed=False):
    """`fixed` may also be "train" or "validation", to mend one of the two alone."""
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    steps = turns(260, 2)
    shape = dict(batch_size=BATCH, num_workers=size(6, 1), pin_memory=DEVICE == "cuda", persistent_workers=True)
    trainer = lightning.Trainer(
        accelerator="gpu" if DEVICE == "cuda" else "cpu", devices=1, precision="bf16-mixed" if DEVICE == "cuda" else 32, max_steps=steps, max_epochs=1,
        val_check_interval=min(50, steps), limit_val_batches=size(10, 1), num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, benchmark=True,
    )
    model = Segmenter(tick, fixed in (True, "train"), fixed in (True, "validation")).to(memory_format=torch.channels_last)
    trainer.fit(model, DataLoader(Streets(BATCH * steps), shuffle=True, **shape), DataLoader(Streets(BATCH * size(10, 1)), **shape))


if __name__ == "__main__":
    run(main)
