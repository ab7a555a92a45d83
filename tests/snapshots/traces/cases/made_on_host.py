"""A training script."""
import torch
from common import STEPS, conv_net, image_step, run, size


def main(tick, fixed=False):
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    shape = (size(64, 4), 3, size(224, 32), size(224, 32))
    clean, y = torch.rand(shape, device="cuda"), torch.randint(0, 1000, shape[:1], device="cuda")
    for step in range(STEPS):
        noise = torch.randn(shape, device="cuda") if fixed else torch.randn(shape).to("cuda")
        image_step(model, optimizer, clean + 0.1 * noise, y)
        tick()


if __name__ == "__main__":
    run(main)
