"""Reverse-time migration of a seismic survey: of each shot the wave is followed forward and kept every few steps, then the recordings are run backward and both multiplied."""
import argparse
import math
import time

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERY = 4


def ground(edge):
    """Layers that get faster with depth, and a dome of salt; squared and scaled for the time step."""
    depth, along = torch.meshgrid(torch.linspace(0, 1, edge, device=DEVICE), torch.linspace(0, 1, edge, device=DEVICE), indexing="ij")
    speed = 1.5 + 2 * (depth * 8).floor() / 8
    speed[(depth - 0.7) ** 2 + (along - 0.5) ** 2 < 0.03] = 4.5
    return (speed / 4.5 * 0.6).square()[1:-1, 1:-1].contiguous()


def advance(now, before, speed, work):
    """One time step; `before` becomes the next."""
    inner = now[1:-1, 1:-1]
    torch.add(now[2:, 1:-1], now[:-2, 1:-1], out=work)
    work.add_(now[1:-1, 2:]).add_(now[1:-1, :-2]).add_(inner, alpha=-4).mul_(speed)
    before[1:-1, 1:-1].neg_().add_(inner, alpha=2).add_(work)
    return before, now


class Store:
    """Waves in pinned memory: what is put there comes back by its number."""

    def __init__(self, waves):
        self.waves, self.wave = waves, torch.empty_like(waves[0], device=DEVICE)

    def put(self, number, wave):
        self.waves[number].copy_(wave, non_blocking=True)

    def get(self, number):
        self.wave.copy_(self.waves[number], non_blocking=True)
        return self.wave


class StoreAside:
    """The same on a stream of its own, by two places in turn; reading begins one wave ahead, from the last to the first."""

    def __init__(self, waves):
        self.waves, self.side = waves, torch.cuda.Stream()
        self.places = [torch.empty_like(waves[0], device=DEVICE) for _ in range(2)]
        self.moved, self.free = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def put(self, number, wave):
        place, main = number % 2, torch.cuda.current_stream()
        main.wait_event(self.moved[place])
        self.places[place].copy_(wave)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.waves[number].copy_(self.places[place], non_blocking=True)
            self.moved[place].record()

    def ask(self, number):
        self.side.wait_event(self.free[number % 2])
        with torch.cuda.stream(self.side):
            self.places[number % 2].copy_(self.waves[number], non_blocking=True)
            self.moved[number % 2].record()

    def get(self, number):
        main = torch.cuda.current_stream()
        if number + 1 < len(self.waves):
            self.free[(number + 1) % 2].record(main)
        else:
            self.ask(number)
        main.wait_event(self.moved[number % 2])
        if number:
            self.ask(number - 1)
        return self.places[number % 2]


def shoot(edge, steps, speed, store, place, image):
    now, before, work = *torch.zeros(2, edge, edge, device=DEVICE), torch.empty_like(speed)
    heard = torch.empty(steps, edge, device=DEVICE)
    for step in range(steps):
        now, before = advance(now, before, speed, work)
        pulse = (math.pi * (step - 40) / 20) ** 2
        now[2, place] += (1 - 2 * pulse) * math.exp(-pulse)
        heard[step] = now[3]
        if step % EVERY == 0:
            store.put(step // EVERY, now)
    now, before = torch.zeros(2, edge, edge, device=DEVICE)
    for step in reversed(range(steps)):
        now, before = advance(now, before, speed, work)
        now[3] += heard[step]
        if step % EVERY == 0:
            image.addcmul_(store.get(step // EVERY), now)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--shots", type=int, default=40)
    options = parser.parse_args()
    edge, steps = (64, 60) if options.tiny else (3072, 384)
    start = time.perf_counter()
    speed, image = ground(edge), torch.zeros(edge, edge, device=DEVICE)
    waves = torch.empty(-(-steps // EVERY), edge, edge, pin_memory=DEVICE == "cuda")
    store = (StoreAside if options.fixed and DEVICE == "cuda" else Store)(waves)
    for shot in range(options.shots):
        shoot(edge, steps, speed, store, (2 * shot + 1) * edge // (2 * options.shots), image)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"image {image.abs().mean().item():.4e}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
