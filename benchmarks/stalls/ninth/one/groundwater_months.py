"""Heads of the groundwater under a valley, month by month: each month is solved for by conjugate gradients, begun at the month before."""
import argparse
import math
import time

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Aquifer:
    """Cells that store water and let it through to their neighbours, by what the ground there is made of."""

    def __init__(self, edge, storage):
        chance = torch.Generator().manual_seed(0)
        rough = torch.randn(1, 1, edge // 16, edge // 16, generator=chance)
        ground = torch.nn.functional.interpolate(rough, size=(edge, edge), mode="bicubic")[0, 0].mul(1.5).exp().double().to(DEVICE)
        self.east = 2 / (1 / ground[:, 1:] + 1 / ground[:, :-1])
        self.south = 2 / (1 / ground[1:] + 1 / ground[:-1])
        self.storage = storage
        self.diagonal = torch.full_like(ground, storage)
        for part, conductance in ((self.diagonal[:, 1:], self.east), (self.diagonal[:, :-1], self.east), (self.diagonal[1:], self.south), (self.diagonal[:-1], self.south)):
            part += conductance

    def apply(self, heads):
        east, south = self.east * (heads[:, 1:] - heads[:, :-1]), self.south * (heads[1:] - heads[:-1])
        flow = self.storage * heads
        flow[:, :-1] -= east
        flow[:, 1:] += east
        flow[:-1] -= south
        flow[1:] += south
        return flow


class ConjugateGradients:
    def __init__(self, aquifer, edge):
        self.aquifer = aquifer
        self.heads, self.residual, self.way = (torch.zeros(edge, edge, dtype=torch.float64, device=DEVICE) for _ in range(3))
        self.product, self.error = (torch.zeros((), dtype=torch.float64, device=DEVICE) for _ in range(2))

    def begin(self, right):
        self.residual.copy_(right - self.aquifer.apply(self.heads))
        self.way.copy_(self.residual / self.aquifer.diagonal)
        self.product.copy_((self.residual * self.way).sum())

    def iterate(self):
        flow = self.aquifer.apply(self.way)
        length = self.product / (self.way * flow).sum()
        self.heads += length * self.way
        self.residual -= length * flow
        scaled = self.residual / self.aquifer.diagonal
        product = (self.residual * scaled).sum()
        self.way.mul_(product / self.product).add_(scaled)
        self.product.copy_(product)
        self.error.copy_(self.residual.norm())

    def solve(self, right, tolerance):
        self.begin(right)
        bound, iterations = tolerance * right.norm().item(), 0
        while True:
            self.iterate()
            iterations += 1
            if self.error.item() < bound:
                return iterations


class InPieces(ConjugateGradients):
    """25 iterations are one CUDA graph, and the error is looked at after them."""

    PIECE = 25

    def __init__(self, aquifer, edge):
        super().__init__(aquifer, edge)
        self.piece = self.some
        if DEVICE == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.iterate()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.some()
            self.piece = graph.replay
            self.heads.zero_()

    def some(self):
        for _ in range(self.PIECE):
            self.iterate()

    def solve(self, right, tolerance):
        self.begin(right)
        bound, iterations = tolerance * right.norm().item(), 0
        while True:
            self.piece()
            iterations += self.PIECE
            if self.error.item() < bound:
                return iterations


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--months", type=int, default=48)
    options = parser.parse_args()
    edge, options.months = (64, 4) if options.tiny else (512, options.months)
    start = time.perf_counter()
    aquifer = Aquifer(edge, storage=2e-3)
    solver = (InPieces if options.fixed else ConjugateGradients)(aquifer, edge)
    wells = torch.zeros(edge, edge, dtype=torch.float64, device=DEVICE)
    wells[edge // 3 :: edge // 4, edge // 5 :: edge // 4] = 1
    iterations, lowest = 0, torch.zeros(options.months, dtype=torch.float64, device=DEVICE)
    for month in range(options.months):
        rain = 1 + math.cos(2 * math.pi * month / 12)
        pumped = 40 if month % 12 in range(4, 9) else 3
        needed = solver.solve(aquifer.storage * solver.heads + 1e-3 * rain - 1e-2 * pumped * wells, tolerance=1e-6)
        iterations += needed
        lowest[month] = solver.heads.amin()
        if month % 12 == 11:
            print(f"year {month // 12 + 1}: {iterations} iterations so far")
    print(f"lowest heads on average {lowest.mean().item():.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
