"""The next radar picture of a storm from the last ones, by a transformer of patches; now and then all that is needed to go on is saved."""
import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.nn as nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATCH, PAST = 16, 6


class Nowcast(nn.Module):
    def __init__(self, wide, deep, places):
        super().__init__()
        self.enter, self.places = nn.Conv2d(PAST, wide, PATCH, PATCH), nn.Parameter(torch.zeros(places, wide))
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 64), 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, deep, nn.LayerNorm(wide), enable_nested_tensor=False)
        self.leave = nn.ConvTranspose2d(wide, 1, PATCH, PATCH)

    def forward(self, past):
        x = self.enter(past)
        x = self.body(x.flatten(2).mT + self.places).mT.reshape(x.shape)
        return past[:, -1] + self.leave(x)[:, 0]


def storms(count, edge):
    """Cells of rain that wander; the last of the pictures is to be said."""
    line = torch.linspace(0, 1, edge, device=DEVICE)
    places, ways = torch.rand(count, 2, 8, device=DEVICE), 0.02 * torch.randn(count, 2, 8, device=DEVICE)
    pictures = []
    for number in range(PAST + 1):
        near = (line - (places + number * ways)[..., None]).square().mul(-80).exp()
        pictures.append(torch.einsum("cky,ckx->cyx", near[:, 0], near[:, 1]))
    return torch.stack(pictures, 1)


class Saving:
    def __init__(self, model, optimizer, folder):
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step):
        torch.save(self.state(), Path(self.folder, f"{step % 2}.pt"))

    def done(self):
        pass


class SavingBeside(Saving):
    """A copy to pinned memory, made once and used again, is what a thread writes."""

    def __init__(self, *what):
        super().__init__(*what)
        self.kept, self.thread = {}, None

    def copied(self, thing, name=""):
        if isinstance(thing, dict):
            return {key: self.copied(value, f"{name}.{key}") for key, value in thing.items()}
        if not isinstance(thing, torch.Tensor):
            return thing
        if name not in self.kept:
            self.kept[name] = torch.empty(thing.shape, dtype=thing.dtype, pin_memory=DEVICE == "cuda")
        return self.kept[name].copy_(thing.detach(), non_blocking=True)

    def save(self, step):
        self.done()
        state, copied = self.copied(self.state()), torch.cuda.Event() if DEVICE == "cuda" else None
        if copied:
            copied.record()

        def write():
            if copied:
                copied.synchronize()
            torch.save(state, Path(self.folder, f"{step % 2}.pt"))

        self.thread = threading.Thread(target=write)
        self.thread.start()

    def done(self):
        if self.thread:
            self.thread.join()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=100)
    options = parser.parse_args()
    wide, deep, edge, batch, every = (32, 2, 64, 2, 2) if options.tiny else (768, 14, 384, 48, 28)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Nowcast(wide, deep, (edge // PATCH) ** 2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=DEVICE == "cuda")
    seen, total = storms(batch * 4, edge), torch.zeros((), device=DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        saving = (SavingBeside if options.fixed else Saving)(model, optimizer, folder)
        for turn in range(options.turns):
            pictures = seen[turn % 4 * batch :][:batch]
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                said = model(pictures[:, :PAST])
            loss = (said.float() - pictures[:, PAST]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if turn % every == every - 1:
                saving.save(turn)
        saving.done()
    print(f"mean loss {total.item() / options.turns:.5f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
