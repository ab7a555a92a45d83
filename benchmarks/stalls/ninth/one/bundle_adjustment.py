"""Where many photographs of a church were taken, and where its corners are: both are turned until the corners fall where they were seen."""
import argparse
import time

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def turned(vectors, points):
    """Points [..., n, 3] turned by rotation vectors [..., 3] (Rodrigues)."""
    angle = (vectors.square().sum(-1, keepdim=True) + 1e-16).sqrt()
    axis = (vectors / angle).unsqueeze(-2)
    cosine, sine = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    along = (axis * points).sum(-1, keepdim=True)
    return points * cosine + torch.linalg.cross(axis.expand_as(points), points, dim=-1) * sine + axis * along * (1 - cosine)


def seen_from(camera, points):
    """camera [..., 7]: rotation, place, bend of the lens. What is seen [..., n, 2]."""
    local = turned(camera[..., :3], points) + camera[..., None, 3:6]
    flat = local[..., :2] / local[..., 2:]
    far = flat.square().sum(-1, keepdim=True)
    return flat * (1 + camera[..., None, 6:] * far)


class Church:
    """What was measured: which corners each photograph shows, and where on it."""

    def __init__(self, photographs, corners, shown):
        chance = torch.Generator().manual_seed(0)
        points = torch.randn(corners, 3, generator=chance, dtype=torch.float64)
        cameras = torch.zeros(photographs, 7, dtype=torch.float64)
        cameras[:, 1] = torch.linspace(-1.2, 1.2, photographs, dtype=torch.float64)
        cameras[:, :3] += 0.05 * torch.randn(photographs, 3, generator=chance, dtype=torch.float64)
        cameras[:, 5], cameras[:, 6] = 8.0, 0.02
        self.shown = torch.stack([torch.randperm(corners, generator=chance)[:shown] for _ in range(photographs)])
        self.places = seen_from(cameras, points[self.shown]) + 1e-4 * torch.randn(photographs, shown, 2, generator=chance, dtype=torch.float64)
        self.guess = (
            cameras + 0.01 * torch.randn(cameras.shape, generator=chance, dtype=torch.float64),
            points + 0.03 * torch.randn(points.shape, generator=chance, dtype=torch.float64),
        )
        self.shown, self.places = self.shown.to(DEVICE), self.places.to(DEVICE)


def misfit(church, cameras, points):
    total = 0
    for number in range(len(cameras)):
        seen = seen_from(cameras[number], points[church.shown[number]])
        away = (seen - church.places[number]).square().sum(-1)
        total = total + (1 + 1e4 * away).log().sum()
    return total


def misfit_of_all(church, cameras, points):
    away = (seen_from(cameras, points[church.shown]) - church.places).square().sum(-1)
    return (1 + 1e4 * away).log().sum()


def adjust(church, measure, iterations):
    cameras, points = (part.to(DEVICE).requires_grad_() for part in church.guess)
    endless = {"tolerance_grad": 0, "tolerance_change": 0, "max_eval": 2 * iterations}
    optimizer = torch.optim.LBFGS([cameras, points], max_iter=iterations, history_size=12, line_search_fn="strong_wolfe", **endless)
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = measure(church, cameras, points)
        loss.backward()
        return loss

    optimizer.step(closure)
    return measure(church, cameras.detach(), points.detach()) / church.shown.numel(), evaluations


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--iterations", type=int, default=150)
    options = parser.parse_args()
    photographs, corners, shown, iterations = (4, 40, 30, 30) if options.tiny else (56, 4000, 1200, options.iterations)
    start = time.perf_counter()
    church = Church(photographs, corners, shown)
    misfit_left, evaluations = adjust(church, misfit_of_all if options.fixed else misfit, iterations)
    print(f"{evaluations} evaluations, misfit of a corner {misfit_left.item():.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
