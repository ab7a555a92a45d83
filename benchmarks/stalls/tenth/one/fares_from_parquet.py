"""What a taxi ride will cost, by a transformer over a ride's columns: rides come from a Parquet file, group of rows by group of rows."""
import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS, NUMBERS = ["card", "cash", "voucher", "app"], 12


def write_rides(path, groups, rows):
    """As the taxi office exports them: times as text, places in degrees."""
    chance, writer = np.random.default_rng(0), None
    stamps = (np.datetime64("2025-01-01") + np.arange(4000).astype("timedelta64[m]") * 131).astype(str)
    for _ in range(groups):
        places = chance.normal((40.75, -73.98, 40.75, -73.98), 0.03, (rows, 4))
        columns = {"begin": stamps[chance.integers(0, 4000, rows)], "way": chance.choice(WAYS, rows), "zone": chance.integers(0, 260, rows)}
        columns |= {name: places[:, number] for number, name in enumerate(("from_lat", "from_lon", "to_lat", "to_lon"))}
        columns["people"] = chance.integers(1, 6, rows)
        columns["fare"] = 3 + 250 * np.hypot(places[:, 0] - places[:, 2], places[:, 1] - places[:, 3]) + chance.normal(0, 0.5, rows)
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=rows)
    writer.close()


def features(rides):
    """Numbers (when, where, how far) and kinds (zone, way of paying, weekday) of each ride."""
    begin = pd.to_datetime(rides["begin"], format="%Y-%m-%dT%H:%M")
    hour = begin.dt.hour + begin.dt.minute / 60
    north, east = np.radians(rides["to_lat"] - rides["from_lat"]), np.radians(rides["to_lon"] - rides["from_lon"])
    half = np.sin(north / 2) ** 2 + np.cos(np.radians(rides["from_lat"])) * np.cos(np.radians(rides["to_lat"])) * np.sin(east / 2) ** 2
    far = 2 * 6371 * np.arcsin(np.sqrt(half))
    crowded = rides.groupby(["zone", begin.dt.hour])["people"].transform("mean")
    usual = rides.assign(far=far).groupby("zone")["far"].transform("median")
    label = rides["zone"].astype(str).str.zfill(3) + "-" + rides["way"].str.upper()
    numbers = [np.sin(hour / 3.82), np.cos(hour / 3.82), begin.dt.day_of_year / 365, north * 1000, east * 1000, far / 5, crowded - 3]
    numbers += [usual / 5, rides["people"] / 3 - 1, (rides["from_lat"] - 40.75) * 30, (rides["from_lon"] + 73.98) * 30, np.arctan2(north, east)]
    kinds = [rides["zone"], rides["way"].map({way: number for number, way in enumerate(WAYS)}), begin.dt.day_of_week, pd.factorize(label, sort=True)[0] % 1024]
    wanted = torch.from_numpy(rides["fare"].to_numpy(np.float32))
    return torch.from_numpy(np.stack(numbers, 1).astype(np.float32)), torch.from_numpy(np.stack(kinds, 1).astype(np.int64)), wanted


class Rides(IterableDataset):
    """Batch by batch, as often as asked; workers share the batches."""

    def __init__(self, path, rounds):
        self.path, self.rounds = path, rounds

    def tables(self, file):
        for _ in range(self.rounds):
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, use_threads=False).to_pandas()

    def __iter__(self):
        worker = get_worker_info()
        share, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        with pq.ParquetFile(self.path) as file:
            for number, rides in enumerate(self.tables(file)):
                batch = features(rides)  # STALL: input_late
                if number % workers == share:
                    yield batch


class RidesShared(Rides):
    """A worker reads only what it will hand out."""

    def __iter__(self):
        worker = get_worker_info()
        share, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        with pq.ParquetFile(self.path) as file:
            for number in range(share, self.rounds * file.num_row_groups, workers):
                yield features(file.read_row_group(number % file.num_row_groups, use_threads=False).to_pandas())


class Fares(nn.Module):
    """Each column is a token."""

    def __init__(self, wide, deep):
        super().__init__()
        self.weights, self.biases = nn.Parameter(torch.randn(NUMBERS, wide)), nn.Parameter(torch.randn(NUMBERS, wide))
        self.kinds = nn.ModuleList(nn.Embedding(count, wide) for count in (260, len(WAYS), 7, 1024))
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 32), 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, deep, enable_nested_tensor=False), nn.Linear(wide, 1)

    def forward(self, numbers, kinds):
        x = numbers[:, :, None] * self.weights + self.biases
        x = torch.cat([x, torch.stack([table(kinds[:, number]) for number, table in enumerate(self.kinds)], 1)], 1)
        return self.head(self.body(x).mean(1))[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    groups, rows, wide, deep, rounds, workers = (6, 64, 32, 1, 2, 2) if options.tiny else (40, 8192, 256, 5, options.rounds, 8)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rides.parquet")
        write_rides(path, groups, rows)
        start = time.perf_counter()
        model = Fares(wide, deep).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")
        loader = DataLoader((RidesShared if options.fixed else Rides)(path, rounds), None, num_workers=workers, pin_memory=DEVICE == "cuda", prefetch_factor=3)
        total, batches = torch.zeros((), device=DEVICE), 0
        for batch in loader:  # STALL: input_late
            numbers, kinds, wanted = (part.to(DEVICE, non_blocking=True) for part in batch)
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
                said = model(numbers, kinds)
            loss = F.smooth_l1_loss(said.float(), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            batches += 1
        print(f"{batches} batches, mean loss {total.item() / batches:.4f}")
        print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
