"""Soil moisture between the probes of a region, by a sparse variational Gaussian process in GPyTorch: place, depth and day in, moisture out."""
import argparse
import time

import gpytorch
import torch
from torch.utils.data import DataLoader, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Moisture(gpytorch.models.ApproximateGP):
    def __init__(self, inducing):
        spread = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
        strategy = gpytorch.variational.VariationalStrategy(self, inducing, spread, learn_inducing_locations=True)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=inducing.shape[1]))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def readings(count):
    chance = torch.Generator().manual_seed(3)
    x = torch.rand(count, 4, generator=chance)
    rain = torch.sin(6 * x[:, 3]) * torch.exp(-2 * x[:, 2])
    y = rain + 0.5 * torch.cos(5 * x[:, 0]) * torch.sin(4 * x[:, 1]) + 0.1 * torch.randn(count, generator=chance)
    return x.to(DEVICE), y.to(DEVICE)


class Batches:
    """Rows of tensors in any order, a slice of the order at a time."""

    def __init__(self, x, y, batch, shuffle):
        self.x, self.y, self.batch, self.shuffle = x, y, batch, shuffle

    def __iter__(self):
        count = len(self.x)
        order = torch.randperm(count, device=DEVICE) if self.shuffle else torch.arange(count, device=DEVICE)
        for rows in order.split(self.batch):
            yield self.x[rows], self.y[rows]


def batches(x, y, options, shuffle):
    if options.fixed:
        return Batches(x, y, options.batch, shuffle)
    return DataLoader(TensorDataset(x, y), batch_size=options.batch, shuffle=shuffle)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--epochs", type=int, default=7)
    options = parser.parse_args()
    count, options.batch, inducing = (600, 100, 20) if options.tiny else (262_144, 4096, 512)
    torch.manual_seed(0)
    start = time.perf_counter()
    x, y = readings(count)
    held = count // 8
    learning = batches(x[held:], y[held:], options, shuffle=True)
    asking = batches(x[:held], y[:held], options, shuffle=False)
    model = Moisture(x[held : held + inducing].clone()).to(DEVICE)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(DEVICE)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=count - held)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
    for epoch in range(options.epochs):
        model.train()
        likelihood.train()
        total, number = torch.zeros((), device=DEVICE), 0
        for places, moisture in learning:
            optimizer.zero_grad()
            loss = -bound(model(places), moisture)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            number += 1
        model.eval()
        likelihood.eval()
        wrong = torch.zeros((), device=DEVICE)
        with torch.no_grad():
            for places, moisture in asking:
                wrong += (model(places).mean - moisture).square().sum()
        print(f"epoch {epoch}: loss {total.item() / number:.4f}, error held out {(wrong / held).sqrt().item():.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
