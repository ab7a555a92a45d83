"""SGD written by hand and an average of the weights, both parameter by parameter: hundreds of tiny kernels a step."""
import torch
import torch.nn.functional as F

from models import STEPS, resnet, run, size


def main(tick, fixed=False):
    model = resnet(width=64, blocks=5)
    weights = list(model.parameters())
    averages = [weight.detach().clone() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in weights]
    x = torch.randn(size(128, 2), 3, size(160, 32), size(160, 32), device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, x.shape[:1], device="cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            if fixed:
                grads = torch._foreach_add(grads, weights, alpha=1e-4)
                torch._foreach_mul_(momenta, 0.9)
                torch._foreach_add_(momenta, grads)
                torch._foreach_add_(weights, momenta, alpha=-1e-2)
                torch._foreach_lerp_(averages, weights, 1e-3)
            else:
                for weight, grad, momentum, mean in zip(weights, grads, momenta, averages):
                    grad = grad.add(weight, alpha=1e-4)
                    momentum.mul_(0.9).add_(grad)
                    weight.add_(momentum, alpha=-1e-2)
                    mean.mul_(0.999).add_(weight, alpha=1e-3)  # STALL: launch_bound
        tick()


if __name__ == "__main__":
    run(main)
