"""A small galaxy falls into a large one: every star pulls every other, and each rank moves the stars of its part of the sky."""
import torch
import torch.distributed as dist
from job import DEVICE, run

SOFT, STEP = 0.05, 0.01


def two_galaxies(stars, chance):
    """The large one has four stars in five."""
    large = stars * 4 // 5
    spread = torch.cat([torch.full((large, 1), 0.4), torch.full((stars - large, 1), 0.2)]).to(DEVICE)
    middle = torch.zeros(stars, 3, device=DEVICE)
    middle[:, 0] = torch.cat([torch.full((large,), -2.0), torch.full((stars - large,), 2.0)]).to(DEVICE)
    places = middle + spread * torch.randn(stars, 3, device=DEVICE, generator=chance)
    speeds = 0.3 * torch.randn(stars, 3, device=DEVICE, generator=chance)
    speeds[:, 0] -= 0.2 * middle[:, 0].sign()
    return places, speeds


def border(places, args):
    """Where along the first axis the sky is cut."""
    return places[:, 0].median() if args.fixed else (places[:, 0].min() + places[:, 0].max()) / 2


def share(places, speeds, args):
    """All stars sorted by owner, and how many each rank has."""
    owner = (places[:, 0] > border(places, args)).long()
    order = owner.argsort(stable=True)
    return places[order], speeds[order], torch.bincount(owner, minlength=dist.get_world_size()).tolist()


def pulls(mine, places, rows):
    """The acceleration of some stars by all."""
    found = []
    heavy = torch.cat([places, torch.ones_like(places[:, :1])], 1)
    for some in mine.split(rows):
        square = torch.cdist(some, places, compute_mode="use_mm_for_euclid_dist").square_().add_(SOFT**2)
        both = (square.rsqrt_().pow_(3) @ heavy) / len(places)
        found.append(both[:, :3] - some * both[:, 3:])
    return torch.cat(found)


def tell(parts):
    """Everybody's stars to everybody."""
    for owner, part in enumerate(parts):
        dist.broadcast(part, src=owner)


def main(args):
    places, speeds, counts = share(*two_galaxies(args.stars, torch.Generator(DEVICE).manual_seed(4)), args)
    places, speed = places.contiguous(), speeds.split(counts)[dist.get_rank()].clone()
    parts = places.split(counts)
    mine = parts[dist.get_rank()]
    for step in range(1, args.steps + 1):
        speed += STEP * pulls(mine, places, args.rows)
        mine += STEP * speed
        tell(parts)
        if step % 60 == 0:
            moving = speed.square().sum()
            dist.all_reduce(moving)
            if dist.get_rank() == 0:
                print(f"{step}: moving {moving.item() / args.stars:.5f}", flush=True)
    if dist.get_rank() == 0:
        print(f"spread at last {places.std(0).norm().item():.4f}; {counts} stars")


if __name__ == "__main__":
    run(main, steps=130, stars=65_536, rows=4096)
