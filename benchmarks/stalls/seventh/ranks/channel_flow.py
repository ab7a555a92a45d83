"""Flow past a cylinder by a lattice Boltzmann method; each rank has half of the channel, and they tell each other the rows where the halves meet."""
import torch
import torch.distributed as dist
from job import DEVICE, run

MOVES = torch.tensor([(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)])
SHARES = torch.tensor([4 / 9, *[1 / 9] * 4, *[1 / 36] * 4])
BACK = torch.tensor([0, 3, 4, 1, 2, 7, 8, 5, 6])


def rest(density, down, across, shares):
    """What the densities of the nine directions tend to."""
    moves = MOVES.to(DEVICE).float()
    along = moves[:, 0, None, None] * down + moves[:, 1, None, None] * across
    return shares * density * (1 + 3 * along + 4.5 * along.square() - 1.5 * (down.square() + across.square()))


def collide(flow, solid, back, shares, moves, pull):
    density = flow.sum(0)
    down = (flow * moves[0]).sum(0) / density
    across = (flow * moves[1]).sum(0) / density + pull
    along = moves[0] * down + moves[1] * across
    calm = shares * density * (1 + 3 * along + 4.5 * along.square() - 1.5 * (down.square() + across.square()))
    return torch.where(solid, flow[back], torch.lerp(flow, calm, 1.6))


def told_by_host(edges, peer):
    mine = edges.cpu()
    theirs = torch.empty_like(mine)
    sending = dist.isend(mine, peer)
    dist.recv(theirs, peer)
    sending.wait()
    return theirs.to(DEVICE)


def told(edges, peer):
    theirs = torch.empty_like(edges)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, edges, peer), dist.P2POp(dist.irecv, theirs, peer)]):
        work.wait()
    return theirs


def stream(flow, above, below):
    """Everything moves by one cell; the channel closes on itself in both ways."""
    whole = torch.cat([above[:, None], flow, below[:, None]], 1)
    high = flow.shape[1]
    moved = [whole[number, 1 - down : 1 - down + high].roll(across, 1) for number, (down, across) in enumerate(MOVES.tolist())]
    return torch.stack(moved)


def main(args):
    rank, high, across = dist.get_rank(), args.high, args.across
    peer, tell = 1 - rank, told if args.fixed else told_by_host
    shares, moves = SHARES.to(DEVICE)[:, None, None], MOVES.to(DEVICE).float().mT[..., None, None]
    back = BACK.to(DEVICE)
    rows = torch.arange(rank * high, (rank + 1) * high, device=DEVICE)[:, None]
    columns = torch.arange(across, device=DEVICE)
    solid = (rows - high) ** 2 + (columns - across // 5) ** 2 < (high // 6) ** 2
    ones = torch.ones(high, across, device=DEVICE)
    flow = rest(ones + 0.01 * torch.rand_like(ones), 0 * ones, 0.05 * ones, shares)
    for step in range(args.steps):
        flow = collide(flow, solid, back, shares, moves, 2e-5)
        theirs = tell(torch.stack([flow[:, 0], flow[:, -1]]), peer)
        flow = stream(flow, above=theirs[1], below=theirs[0])
        if step % 1000 == 999:
            fast = ((flow * moves[1]).sum(0) / flow.sum(0)).abs().max()
            dist.all_reduce(fast, op=dist.ReduceOp.MAX)
            if rank == 0:
                print(f"{step + 1}: {fast.item():.4f} at most", flush=True)
    if rank == 0:
        print(f"density {flow.sum(0).mean().item():.5f}")


if __name__ == "__main__":
    run(main, backend="cpu:gloo,cuda:nccl", steps=9000, high=512, across=1536)
