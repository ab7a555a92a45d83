"""Eight bits for a MobileNet: hooks look at what comes out of its layers, first for the range, then for a histogram, which gives each a scale."""
import argparse
import time

import numpy as np
import timm
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BINS, EACH = 2048, 8


class Observer:
    """Hangs on one layer: its range in the first pass, its histogram in the second."""

    def __init__(self, name):
        self.name, self.low, self.high = name, float("inf"), float("-inf")
        self.counts, self.counting = np.zeros(BINS), False

    def __call__(self, _module, _inputs, output):
        if self.counting:
            self.count(output.detach())
        else:
            self.low = min(self.low, output.min().item())
            self.high = max(self.high, output.max().item())

    def count(self, output):
        values = output.float().cpu().numpy().ravel()[::EACH]
        counts, _ = np.histogram(values, BINS, (self.low, self.high))
        self.counts += counts

    def scale(self, share=0.9995):
        """The distance from zero that holds nearly all of what was seen, in steps of eight bits."""
        counts = np.asarray(self.counts)
        edges = np.linspace(self.low, self.high, BINS + 1)
        far = np.maximum(np.abs(edges[:-1]), np.abs(edges[1:]))
        order = far.argsort()
        held = counts[order].cumsum() / counts.sum()
        return far[order][min(held.searchsorted(share), BINS - 1)] / 127


class ObserverOnDevice(Observer):
    def __init__(self, name):
        super().__init__(name)
        self.ends = torch.tensor([float("inf"), float("-inf")], device=DEVICE)
        self.counts = torch.zeros(BINS, device=DEVICE)

    def __call__(self, _module, _inputs, output):
        if self.counting:
            self.count(output.detach())
        else:
            low, high = output.aminmax()
            self.ends = torch.stack([torch.minimum(self.ends[0], low), torch.maximum(self.ends[1], high)])

    def count(self, output):
        if isinstance(self.low, float) and self.low == float("inf"):
            self.low, self.high = self.ends.tolist()
        self.counts += torch.histc(output.flatten()[::EACH].float(), BINS, self.low, self.high)

    def scale(self, share=0.9995):
        self.counts = self.counts.cpu().numpy()
        return super().scale(share)


class Calibration:
    def __init__(self, model, kind):
        self.model, self.observers = model, []
        for name, module in model.named_modules():
            if name.endswith(("bn1", "bn2", "bn3")):
                self.observers.append(kind(name))
                module.register_forward_hook(self.observers[-1])

    @torch.inference_mode()
    def go_through(self, pictures, counting):
        for observer in self.observers:
            observer.counting = counting
        for batch in pictures:
            self.model(batch.to(DEVICE, non_blocking=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    batch, edge, batches = (2, 64, 2) if options.tiny else (64, 224, options.batches)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = timm.create_model("mobilenetv3_large_100").eval().to(DEVICE)
    pictures = [torch.rand(batch, 3, edge, edge, pin_memory=DEVICE == "cuda").mul_(2).sub_(1) for _ in range(2)]
    pictures = [pictures[number % 2] for number in range(batches)]
    calibration = Calibration(model, ObserverOnDevice if options.fixed else Observer)
    calibration.go_through(pictures, counting=False)
    calibration.go_through(pictures, counting=True)
    scales = [observer.scale() for observer in calibration.observers]
    print(f"{len(scales)} layers, mean logarithm of their scales {np.log(scales).mean():.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
