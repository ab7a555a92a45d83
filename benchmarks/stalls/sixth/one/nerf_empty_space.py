"""A radiance field of two balls; which cells of space are empty is looked up when rays are sampled, and found out anew every 16 steps."""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--turns", type=int, default=320)
parser.add_argument("--rays", type=int, default=4096)
parser.add_argument("--cells", type=int, default=128, help="along each edge")
options = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES, OCTAVES, WIDE, EVERY = 96, 10, 256, 16


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        inner = 3 + 6 * OCTAVES
        self.first = nn.ModuleList([nn.Linear(inner, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(3))])
        self.second = nn.ModuleList([nn.Linear(WIDE + inner, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(2))])
        self.density_head, self.colour_head = nn.Linear(WIDE, 1), nn.Sequential(nn.Linear(WIDE, WIDE // 2), nn.ReLU(), nn.Linear(WIDE // 2, 3))

    def trunk(self, points):
        waves = points[..., None] * 2.0 ** torch.arange(OCTAVES, device=points.device)
        inner = torch.cat([points, waves.sin().flatten(-2), waves.cos().flatten(-2)], -1)
        x = inner
        for layer in self.first:
            x = F.relu(layer(x))
        x = torch.cat([x, inner], -1)
        for layer in self.second:
            x = F.relu(layer(x))
        return x

    def density(self, points):
        return F.softplus(self.density_head(self.trunk(points)).float()[..., 0] - 1)

    def forward(self, points):
        x = self.trunk(points)
        return F.softplus(self.density_head(x).float()[..., 0] - 1), self.colour_head(x).float().sigmoid()


class Occupancy:
    """How dense each cell has been lately, and which cells or their neighbours are worth a sample."""

    def __init__(self, cells, keep_on):
        self.cells, axis = cells, (torch.arange(cells, device=keep_on) + 0.5) / cells * 2 - 1
        self.centres = torch.cartesian_prod(axis, axis, axis)
        self.lately = torch.zeros(cells**3, device=keep_on)
        self.full = torch.ones(cells**3, device=DEVICE)

    @torch.no_grad()
    def update(self, field):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            found = torch.cat([field.density(part.to(DEVICE)).to(self.lately.device) for part in self.centres.split(1 << 18)])
        self.lately = torch.maximum(self.lately * 0.95, found)
        grid = (self.lately > self.lately.mean().clamp(max=0.5)).float().view(1, 1, self.cells, self.cells, self.cells)
        self.full = F.max_pool3d(grid, 3, 1, 1).flatten().to(DEVICE)

    def __call__(self, points):
        x, y, z = ((points + 1) / 2 * self.cells).long().clamp(0, self.cells - 1).unbind(-1)
        return self.full[(x * self.cells + y) * self.cells + z]


def photograph(count):
    """Rays from all around to the middle, and what they see of two balls."""
    eyes = F.normalize(torch.randn(count, 3, device=DEVICE), dim=-1) * 1.6
    ways = F.normalize(torch.rand(count, 3, device=DEVICE) * 0.8 - 0.4 - eyes, dim=-1)
    colours = torch.ones(count, 3, device=DEVICE)
    for middle, radius, colour in (((0.25, 0.0, 0.0), 0.3, 0.2), ((-0.3, 0.1, 0.2), 0.2, 0.7)):
        beside = torch.tensor(middle, device=DEVICE) - eyes
        along = (beside * ways).sum(-1, keepdim=True)
        hit = (beside.square().sum(-1, keepdim=True) - along.square()) < radius**2
        colours = torch.where(hit, torch.full_like(colours, colour), colours)
    return eyes, ways, colours


def render(field, occupancy, eyes, ways):
    depth = torch.linspace(0.6, 2.6, SAMPLES, device=DEVICE) + torch.rand(len(eyes), SAMPLES, device=DEVICE) * 2 / SAMPLES
    points = eyes[:, None] + ways[:, None] * depth[..., None]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        density, colour = field(points)
    thick = density * occupancy(points) * 2 / SAMPLES
    through = torch.exp(-(thick.cumsum(1) - thick))
    weight = through * (1 - torch.exp(-thick))
    return (weight[..., None] * colour).sum(1) + 1 - weight.sum(1, keepdim=True)


def main():
    torch.manual_seed(0)
    start = time.perf_counter()
    field = Field().to(DEVICE)
    occupancy = Occupancy(options.cells, DEVICE if options.fixed else "cpu")
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-4, fused=DEVICE == "cuda")
    losses = torch.zeros((), device=DEVICE)
    all_eyes, all_ways, all_colours = photograph(options.rays * 32)
    for turn in range(options.turns):
        if turn % EVERY == EVERY - 1:
            occupancy.update(field)
        picked = torch.randint(0, len(all_eyes), (options.rays,), device=DEVICE)
        loss = F.mse_loss(render(field, occupancy, all_eyes[picked], all_ways[picked]), all_colours[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.detach()
    print(f"loss {losses.item() / options.turns:.5f}, full {occupancy.full.mean().item():.3f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
