"""Gradients clipped one parameter at a time: five tiny kernels for each, in a step that waits for its launches."""

import torch
import torch.nn.functional as F

from models import STEPS, TextClassifier, run, size


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = TextClassifier(width=384, layers=10, heads=6)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    x = torch.randint(0, 8192, (size(16, 2), size(96, 8)), device="cuda")
    y = torch.randint(0, 20, x.shape[:1], device="cuda")
    for step in range(STEPS):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if fixed:
            grads = [weight.grad for weight in weights]
            norms = torch.stack(torch._foreach_norm(grads))
            torch._foreach_mul_(grads, (0.1 / (norms + 1e-6)).clamp(max=1).unbind())
        else:
            for weight in weights:
                norm = weight.grad.norm()
                weight.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1))  # STALL: launch_bound
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
