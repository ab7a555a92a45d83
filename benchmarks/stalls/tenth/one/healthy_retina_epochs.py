"""Diseases of the retina by a ResNet-50: a loader with workers, the loss of each step read one step later, after each epoch scikit-learn's AUC."""
import argparse
import copy
import time

import timm
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Retinas(Dataset):
    """Whole batches: half of the pictures, the sick ones, have brighter vessels."""

    def __init__(self, batches, batch, edge, seed):
        chance = torch.Generator().manual_seed(seed)
        self.stock = torch.randint(0, 180, (512, 3, edge, edge), dtype=torch.uint8, generator=chance)
        self.stock[::2, 1] += 40
        self.batches, self.batch, self.seed = batches, batch, seed

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        rows = torch.randint(0, 512, (self.batch,), generator=torch.Generator().manual_seed(self.seed * 9973 + index))
        return self.stock[rows], (rows % 2 == 0).float()


def seen(model, pictures):
    x = pictures.to(DEVICE, non_blocking=True).contiguous(memory_format=torch.channels_last).float().sub(90).div(60)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        return model(x)[:, 0].float()


class Training:
    def __init__(self, model):
        self.model, self.losses, self.before = model, [], None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=DEVICE == "cuda")

    def step(self, pictures, sick):
        loss = F.binary_cross_entropy_with_logits(seen(self.model, pictures), sick.to(DEVICE, non_blocking=True))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.before is not None:
            self.losses.append(self.before.item())
        self.before = loss.detach()


@torch.inference_mode()
def area(model, held):
    model.eval()
    said, true = zip(*((seen(model, pictures), sick) for pictures, sick in held))
    model.train()
    return roc_auc_score(torch.cat(true).numpy(), torch.cat(said).cpu().numpy())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="no loss is read, and AUC is asked once")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    batch, edge, steps, workers, epochs = (4, 64, 3, 1, 2) if options.tiny else (256, 224, 80, 8, options.epochs)
    torch.manual_seed(0)
    model = timm.create_model("resnet50", num_classes=1).to(DEVICE, memory_format=torch.channels_last)
    how = {"batch_size": None, "num_workers": workers, "pin_memory": DEVICE == "cuda", "persistent_workers": True, "prefetch_factor": 2}
    train, held = DataLoader(Retinas(steps * epochs, batch, edge, 1), **how), list(DataLoader(Retinas(3, batch, edge, 2), None, pin_memory=DEVICE == "cuda"))
    start = time.perf_counter()
    training, best = Training(model), (0.0, None)
    for step, (pictures, sick) in enumerate(train, 1):
        if options.fixed:
            training.before = None
        training.step(pictures, sick)
        if step % steps == 0 and (not options.fixed or step == steps * epochs):
            now = area(model, held)
            best = max(best, (now, copy.deepcopy(model.state_dict())), key=lambda one: one[0])
            print(f"epoch {step // steps}: AUC {now:.4f}", flush=True)
    print(f"{len(training.losses)} losses read, best AUC {best[0]:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
