"""Two-tower recommender with sampled negatives (BPR loss), DDP."""
import os
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
USERS, ITEMS = (500, 400) if SMALL else (60_000, 40_000)
EVENTS = 4_000 if SMALL else 600_000
BATCH = 128 if SMALL else 4096
EMB, HIDDEN, DEPTH = (16, 32, 1) if SMALL else (64, 1024, 4)
EPOCHS = 2 if SMALL else 8
BATCHES = 6 if SMALL else 70        # per epoch and rank


class Interactions(Dataset):
    """One item of this dataset is one whole batch: users, what they bought, what they did not buy."""

    def __init__(self, seed):
        common = np.random.default_rng(0)
        users = common.integers(0, USERS, EVENTS)
        items = (ITEMS * common.beta(0.6, 2.0, EVENTS)).astype(np.int64)
        self.keys = np.unique(users * ITEMS + items)            # sorted
        self.bought = set(self.keys.tolist())
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return BATCHES

    def negatives_by_hand(self, users):
        out = []
        for u in users.tolist():
            n = int(self.rng.integers(0, ITEMS))
            while u * ITEMS + n in self.bought:
                n = int(self.rng.integers(0, ITEMS))
            out.append(n)
        return np.array(out)

    def negatives_vectorised(self, users):
        out = self.rng.integers(0, ITEMS, len(users))
        while True:
            key = users * ITEMS + out
            at = np.searchsorted(self.keys, key).clip(max=len(self.keys) - 1)
            bad = np.flatnonzero(self.keys[at] == key)
            if len(bad) == 0:
                return out
            out[bad] = self.rng.integers(0, ITEMS, len(bad))

    def __getitem__(self, _):
        users, items = np.divmod(self.keys[self.rng.integers(0, len(self.keys), BATCH)], ITEMS)
        if FIXED:
            negatives = self.negatives_vectorised(users)
        else:
            negatives = self.negatives_by_hand(users)  # FAULT
        return torch.from_numpy(np.stack([users, items, negatives]))


def mlp(n_in):
    layers = [nn.Linear(n_in, HIDDEN), nn.ReLU()]
    for _ in range(DEPTH - 1):
        layers += [nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 64))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, EMB), nn.Embedding(ITEMS, EMB)
        self.user_net, self.item_net = mlp(EMB), mlp(EMB)

    def forward(self, users, pos, neg):
        u = self.user_net(self.user(users))
        both = self.item_net(self.item(torch.cat([pos, neg])))
        p, n = both.chunk(2)
        return (u * (p - n)).sum(-1)


def setup():
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        torch.set_float32_matmul_precision("high")
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def main():
    dev = setup()
    t0 = time.perf_counter()
    cuda = dev.type == "cuda"
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with dev:
        model = TwoTower()
    ddp = DistributedDataParallel(model, device_ids=[dev.index] if cuda else None, gradient_as_bucket_view=True)
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-3, fused=cuda)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=EPOCHS * BATCHES)
    data = Interactions(seed=1 + rank)
    loader = DataLoader(data, batch_size=None, pin_memory=cuda)

    test = np.random.default_rng(9)
    k = data.keys[test.integers(0, len(data.keys), BATCH)][rank::world]
    test_user, test_pos = (torch.from_numpy(x).to(dev) for x in np.divmod(k, ITEMS))
    test_neg = torch.from_numpy(test.integers(0, ITEMS, len(k))).to(dev)

    for epoch in range(EPOCHS):
        model.train()
        tick, total = time.perf_counter(), torch.zeros((), device=dev)
        for batch in loader:
            users, pos, neg = batch.to(dev, non_blocking=True)
            margin = ddp(users, pos, neg)
            loss = nn.functional.softplus(-margin).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        model.eval()
        with torch.no_grad():
            auc = (model(test_user, test_pos, test_neg) > 0).float().mean()
        out = torch.stack([total / BATCHES, auc])
        dist.all_reduce(out)
        if rank == 0:
            loss_, auc_ = (out / world).tolist()
            print(f"epoch {epoch}: bpr {loss_:.4f} auc {auc_:.4f} {BATCHES / (time.perf_counter() - tick):.0f} it/s", flush=True)
            if epoch % 4 == 3:
                torch.save(model.state_dict(), os.path.join(tempfile.gettempdir(), f"twotower{os.getpid()}.pt"))
    if cuda:
        torch.cuda.synchronize()
    if rank == 0:
        print("RUN_SECONDS %.3f" % (time.perf_counter() - t0), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
