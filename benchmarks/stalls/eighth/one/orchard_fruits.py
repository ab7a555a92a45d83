"""Fruits in an orchard with a timm net: gradient norms of every layer are watched, and an average of the weights is kept."""
import argparse
import copy
import time

import timm
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Average:
    """The weights as an exponential mean over the steps."""

    def __init__(self, model, keep):
        self.keep, self.model = keep, copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model):
        for mean, value in zip(self.model.state_dict().values(), model.state_dict().values()):
            if mean.is_floating_point():
                mean.copy_(self.keep * mean + (1 - self.keep) * value)
            else:
                mean.copy_(value)


class AverageAtOnce(Average):
    def __init__(self, model, keep):
        super().__init__(model, keep)
        self.of = model
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values()))
        self.pairs = [list(zip(*(pair for pair in pairs if pair[0].is_floating_point() == real))) for real in (True, False)]

    @torch.no_grad()
    def update(self, model):
        assert model is self.of
        (means, values), (counts, others) = self.pairs
        torch._foreach_lerp_(means, values, 1 - self.keep)
        torch._foreach_copy_(counts, others)


class Watch:
    def __init__(self, model):
        self.names = [name for name, _ in model.named_parameters()]
        self.largest = dict.fromkeys(self.names, 0.0)

    def look(self, model):
        for name, weight in model.named_parameters():
            self.largest[name] = max(self.largest[name], weight.grad.norm().item())

    def done(self):
        name = max(self.largest, key=self.largest.get)
        print(f"largest gradient {self.largest[name]:.4f} at {name}")


class WatchOnDevice(Watch):
    def __init__(self, model):
        super().__init__(model)
        self.most = torch.zeros(len(self.names), device=DEVICE)

    def look(self, model):
        norms = torch._foreach_norm([weight.grad for weight in model.parameters()])
        self.most = torch.maximum(self.most, torch.stack(norms))

    def done(self):
        self.largest = dict(zip(self.names, self.most.tolist()))
        super().done()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=110)
    options = parser.parse_args()
    name, edge, batch, kept = ("efficientnet_b0", 64, 2, 8) if options.tiny else ("efficientnet_b3", 192, 96, 1024)
    torch.manual_seed(0)
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    model = timm.create_model(name, num_classes=60).to(DEVICE, memory_format=torch.channels_last)
    average = (AverageAtOnce if options.fixed else Average)(model, 0.999)
    watch = (WatchOnDevice if options.fixed else Watch)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05, fused=DEVICE == "cuda")
    pictures = torch.randint(0, 256, (kept, 3, edge, edge), dtype=torch.uint8, device=DEVICE)
    kinds = torch.randint(0, 60, (kept,), device=DEVICE)
    for turn in range(options.turns):
        rows = torch.randint(0, kept, (batch,), device=DEVICE)
        some = pictures[rows].float().sub(127).div(70).contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            said = model(some)
        loss = F.cross_entropy(said.float(), kinds[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        watch.look(model)
        optimizer.step()
        average.update(model)
        if turn % 50 == 49:
            print(f"{turn + 1}: loss {loss.item():.4f}")
    watch.done()
    size = sum(weight.abs().sum() for weight in average.model.parameters()).item()
    print(f"average of size {size:.2f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
