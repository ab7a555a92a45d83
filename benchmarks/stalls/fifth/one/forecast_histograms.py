"""Forecasts of many series by a transformer over patches; TensorBoard gets histograms of weights and gradients every 25 steps."""
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import DEVICE, run, size, turns
from torch.utils.tensorboard import SummaryWriter

BATCH, PAST, FUTURE, PATCH, WIDE = size(1024, 4), size(1536, 64), size(192, 16), size(16, 8), size(512, 16)
EDGES = 256


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        count = PAST // PATCH
        self.embed, self.place = nn.Linear(PATCH, WIDE), nn.Parameter(torch.zeros(count, WIDE))
        layer = nn.TransformerEncoderLayer(WIDE, size(8, 2), 4 * WIDE, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, size(8, 1), enable_nested_tensor=False)
        self.head = nn.Linear(count * WIDE, FUTURE)

    def forward(self, past):
        mean, spread = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-3
        x = self.embed(((past - mean) / spread).unflatten(1, (-1, PATCH))) + self.place
        return self.head(self.body(x).flatten(1)) * spread + mean


class Series:
    """Sums of waves with a trend and noise, made where they are used."""

    def __init__(self):
        self.time = torch.arange(PAST + FUTURE, device=DEVICE) / 96

    def draw(self):
        with torch.device(DEVICE):
            waves = [torch.rand(BATCH, 1) * (self.time * 2 * torch.pi * f + torch.rand(BATCH, 1) * 6).sin() for f in (1, 1 / 7, 4)]
            series = sum(waves) + 0.1 * torch.randn(BATCH, 1) * self.time + 0.1 * torch.randn(BATCH, PAST + FUTURE)
        return series[:, :PAST], series[:, PAST:]


class Monitor:
    """Histograms of all weights and their gradients, in TensorBoard."""

    def __init__(self, folder, on_device):
        self.writer, self.on_device = SummaryWriter(folder), on_device

    def scalar(self, name, value, step):
        self.writer.add_scalar(name, value, step)

    def histograms(self, model, step):
        for name, parameter in model.named_parameters():
            if self.on_device:
                self.counted(f"weights/{name}", parameter.detach(), step)
                self.counted(f"gradients/{name}", parameter.grad, step)
            else:
                self.writer.add_histogram(f"weights/{name}", parameter, step)
                self.writer.add_histogram(f"gradients/{name}", parameter.grad, step)

    def counted(self, name, values, step):
        values = values.float().flatten()
        figures = torch.stack([*values.aminmax(), values.sum(), values.square().sum()])
        told = torch.cat([figures, torch.histc(values, EDGES)]).tolist()
        edges = [told[0] + (told[1] - told[0]) * (place + 1) / EDGES for place in range(EDGES)]
        self.writer.add_histogram_raw(name, told[0], told[1], values.numel(), told[2], told[3], edges, told[4:], step)


def main(variant):
    model, series = Forecaster().to(DEVICE), Series()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        monitor, losses = Monitor(folder, variant == "fixed"), torch.zeros((), device=DEVICE)
        for step in range(turns(175, 3)):
            past, future = series.draw()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                forecast = model(past)
            loss = F.huber_loss(forecast.float(), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.detach()
            if step % size(25, 2) == size(24, 1):
                monitor.scalar("loss", losses.item() / size(25, 2), step)
                monitor.histograms(model, step)
                losses.zero_()
        monitor.writer.close()
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main)
