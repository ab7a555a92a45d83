"""A Gaussian process is fitted to measurements by L-BFGS, which asks for the likelihood as a number again and again."""
import math

import numpy as np
import torch
from setting import DEVICE, run, size, turns

POINTS, TESTED, INPUTS = size(14000, 60), size(4000, 20), 6


def measurements(count, seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (count, INPUTS)).astype(np.float32)
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + np.exp(-(x[:, 3] ** 2)) + 0.1 * rng.standard_normal(count)
    return torch.from_numpy(x).to(DEVICE), torch.from_numpy(y.astype(np.float32)).to(DEVICE)


class Process(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.length = torch.nn.Parameter(torch.full((INPUTS,), 0.5))
        self.height, self.noise = torch.nn.Parameter(torch.tensor(0.0)), torch.nn.Parameter(torch.tensor(-2.0))

    def kernel(self, a, b):
        """Matern 3/2 with a length for each input."""
        a, b = a / self.length.exp(), b / self.length.exp()
        squared = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T
        distance = (3 * squared.clamp(min=1e-8)).sqrt()
        return self.height.exp() * (1 + distance) * torch.exp(-distance)

    def factor(self, x):
        covariance = self.kernel(x, x)
        return torch.linalg.cholesky(covariance + (self.noise.exp() + 1e-4) * torch.eye(len(x), device=x.device))

    def loss(self, x, y):
        factor = self.factor(x)
        solved = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
        return 0.5 * solved.square().sum() / len(x) + factor.diagonal().log().mean() + 0.5 * math.log(2 * math.pi)

    @torch.no_grad()
    def predict(self, x, y, new):
        factor = self.factor(x)
        weights = torch.cholesky_solve(y[:, None], factor)
        across = self.kernel(new, x)
        spread = self.height.exp() - torch.linalg.solve_triangular(factor, across.T, upper=False).square().sum(0)
        return (across @ weights)[:, 0], spread + self.noise.exp()


def main(variant):
    x, y = measurements(POINTS, 0)
    process = Process().to(DEVICE)
    optimizer = torch.optim.LBFGS(process.parameters(), lr=0.1, max_iter=1, history_size=10)
    history = []

    def closure():
        optimizer.zero_grad()
        loss = process.loss(x, y)
        loss.backward()
        if variant == "stalled":
            history.append((loss.item(), process.length.exp().tolist(), process.noise.exp().item()))
            gradient = torch.cat([parameter.grad.flatten() for parameter in process.parameters()])
            if not torch.isfinite(gradient).all().item():
                raise FloatingPointError("the gradient is not finite")
        return loss

    for turn in range(turns(32, 2)):
        loss = optimizer.step(closure)
        if variant == "stalled":
            print(f"turn {turn}: {loss.item():.4f}, lengths " + " ".join(f"{length:.2f}" for length in process.length.exp().tolist()))
    new, truth = measurements(TESTED, 1)
    mean, spread = process.predict(x, y, new)
    error = (mean - truth).square().mean().sqrt().item()
    print(f"loss {loss.item():.4f}, error {error:.4f}, mean spread {spread.mean().item():.4f}")


if __name__ == "__main__":
    run(main)
