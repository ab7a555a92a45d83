"""What the sea floor is made of, learnt from a ship's multibeam sonar: a thread reads the packets of each survey line, a net learns beside it."""
import argparse
import queue
import struct
import threading
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEAD, BEAM = struct.Struct("<IHHd"), struct.Struct("<HhB")
RECORDS = np.dtype([("range", "<u2"), ("strength", "<i2"), ("floor", "u1")])
KINDS = 6


def packets(pings, beams, seed):
    """What the sonar's recorder left: a header, then a record for each beam."""
    chance = np.random.default_rng(seed)
    records = np.empty((pings, beams), RECORDS)
    records["floor"] = chance.integers(0, KINDS, (pings // 8 + 1, beams // 16 + 1)).repeat(8, 0).repeat(16, 1)[:pings, :beams]
    records["range"] = 2000 + 80 * records["floor"].astype(np.int16) + chance.integers(0, 200, (pings, beams))
    records["strength"] = 900 * records["floor"].astype(np.int16) - 2500 + chance.integers(-900, 900, (pings, beams))
    return [HEAD.pack(number, beams, 0, 0.25 * number) + records[number].tobytes() for number in range(pings)]


def decode(packet):
    """Ranges, strengths and kinds of floor of one ping."""
    _, beams, _, _ = HEAD.unpack_from(packet, 0)
    ranges, strengths, floors = [], [], []
    for beam in range(beams):
        distance, strength, floor = BEAM.unpack_from(packet, HEAD.size + beam * BEAM.size)
        ranges.append(distance / 2500)
        strengths.append(strength / 3000)
        floors.append(floor)
    return np.array([ranges, strengths], np.float32), np.array(floors, np.int64)


def decode_at_once(packet):
    records = np.frombuffer(packet, RECORDS, offset=HEAD.size)
    return np.stack([records["range"] / np.float64(2500), records["strength"] / np.float64(3000)]).astype(np.float32), records["floor"].astype(np.int64)


class Reader(threading.Thread):
    def __init__(self, line, swath, batch, decoder):
        super().__init__(daemon=True)
        self.line, self.swath, self.batch, self.decoder = line, swath, batch, decoder
        self.waiting = queue.Queue(maxsize=3)

    def run(self):
        step = self.swath * self.batch
        for first in range(0, len(self.line) - step + 1, step):
            sounded, floors = zip(*(self.decoder(packet) for packet in self.line[first : first + step]))
            pictures = np.stack(sounded, 1).reshape(2, self.batch, self.swath, -1).swapaxes(0, 1)
            kinds = np.stack(floors).reshape(self.batch, self.swath, -1)
            batch = torch.from_numpy(pictures.copy()), torch.from_numpy(kinds)
            self.waiting.put(tuple(part.pin_memory() for part in batch) if DEVICE == "cuda" else batch)
        self.waiting.put(None)


class Floor(nn.Module):
    def __init__(self, wide, deep):
        super().__init__()
        self.enter = nn.Conv2d(2, wide, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, wide), nn.GELU(), nn.Conv2d(wide, wide, 3, padding=2**number, dilation=2**number)) for number in (k % 4 for k in range(deep))
        )
        self.leave = nn.Conv2d(wide, KINDS, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def learn_line(model, optimizer, reader, total):
    reader.start()
    batches = 0
    while (batch := reader.waiting.get()) is not None:
        pictures, floors = (part.to(DEVICE, non_blocking=True) for part in batch)
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            said = model(pictures)
        loss = F.cross_entropy(said.float(), floors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        batches += 1
    reader.join()
    return batches


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--lines", type=int, default=24)
    options = parser.parse_args()
    wide, deep, swath, beams, batch = (16, 2, 8, 32, 2) if options.tiny else (64, 12, 64, 256, 4)
    lines = 3 if options.tiny else options.lines
    torch.manual_seed(0)
    survey = [packets(swath * batch * 3, beams, seed) for seed in range(2)]
    start = time.perf_counter()
    model = Floor(wide, deep).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    total, batches = torch.zeros((), device=DEVICE), 0
    for number in range(lines):
        length = swath * batch * (3 + 5 * number % 17)
        recorded = (survey[number % 2] * (length // len(survey[0]) + 1))[:length]
        batches += learn_line(model, optimizer, Reader(recorded, swath, batch, decode_at_once if options.fixed else decode), total)
    print(f"{batches} batches, mean loss {total.item() / batches:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
