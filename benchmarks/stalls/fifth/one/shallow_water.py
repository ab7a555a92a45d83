"""Shallow water over a sea mount, by Lax-Friedrichs fluxes; each step is as long as the fastest wave allows."""
import torch
from setting import DEVICE, run, size, turns

CELLS, GRAVITY, SAFE, SPAN = size(512, 32), 9.81, 0.4, 100.0


def sea():
    """Depth and both momenta of a hump of water in a square basin, and the bottom's slopes."""
    place = torch.linspace(0, SPAN, CELLS, device=DEVICE)
    x, y = torch.meshgrid(place, place, indexing="xy")
    bottom = 0.8 * torch.exp(-((x - 60) ** 2 + (y - 45) ** 2) / 150)
    depth = 2.0 - bottom + 0.6 * torch.exp(-((x - 25) ** 2 + (y - 30) ** 2) / 40)
    width = SPAN / (CELLS - 1)
    slope_x = (bottom.roll(-1, 1) - bottom.roll(1, 1)) / (2 * width)
    slope_y = (bottom.roll(-1, 0) - bottom.roll(1, 0)) / (2 * width)
    return torch.stack([depth, torch.zeros_like(x), torch.zeros_like(x)]), slope_x, slope_y, width


def fluxes(state):
    depth, along, across = state
    u, v = along / depth, across / depth
    pressure = 0.5 * GRAVITY * depth**2
    return torch.stack([along, along * u + pressure, along * v]), torch.stack([across, across * u, across * v + pressure]), u, v


def closed(state):
    """Walls on all sides: momentum through them is turned back."""
    state[1, :, 0], state[1, :, -1] = -state[1, :, 1], -state[1, :, -2]
    state[2, 0], state[2, -1] = -state[2, 1], -state[2, -2]
    state[0, :, 0], state[0, :, -1] = state[0, :, 1], state[0, :, -2]
    state[0, 0], state[0, -1] = state[0, 1], state[0, -2]
    return state


def longest_step(u, v, depth, width):
    wave = (GRAVITY * depth).sqrt()
    return SAFE * width / torch.maximum(u.abs() + wave, v.abs() + wave).max()


def advance(state, f, g, dt, slope_x, slope_y, width):
    mean = (state.roll(1, 2) + state.roll(-1, 2) + state.roll(1, 1) + state.roll(-1, 1)) / 4
    change = (f.roll(-1, 2) - f.roll(1, 2) + g.roll(-1, 1) - g.roll(1, 1)) / (2 * width)
    new = 0.1 * mean + 0.9 * state - dt * change
    new[1] -= dt * GRAVITY * state[0] * slope_x
    new[2] -= dt * GRAVITY * state[0] * slope_y
    return closed(new)


def simulate_asking(state, slope_x, slope_y, width, end, gauge):
    time, steps = 0.0, 0
    while time < end:
        f, g, u, v = fluxes(state)
        dt = min(longest_step(u, v, state[0], width).item(), end - time)
        state = advance(state, f, g, dt, slope_x, slope_y, width)
        gauge[steps % len(gauge)] = state[0, CELLS // 3, CELLS // 2]
        time, steps = time + dt, steps + 1
    return state, steps


def simulate_recorded(state, slope_x, slope_y, width, end, gauge):
    """The time stays on the device; a step past the end has no length. A hundred steps are recorded once and played again."""
    time, steps = (torch.zeros((), device=DEVICE, dtype=torch.float64) for _ in range(2))

    def step():
        f, g, u, v = fluxes(state)
        dt = torch.minimum(longest_step(u, v, state[0], width).double(), end - time)
        new = advance(state, f, g, dt.float(), slope_x, slope_y, width)
        state.copy_(torch.where(dt > 0, new, state))
        gauge.index_copy_(0, steps.long()[None] % len(gauge), state[0, CELLS // 3, CELLS // 2][None])
        time.add_(dt)
        steps.add_(dt > 0)

    play = step
    if DEVICE == "cuda":
        kept, side = state.clone(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        state.copy_(kept), time.zero_(), steps.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        play = graph.replay
    while time.item() < end:
        for _ in range(100):
            play()
    return state, int(steps.item())


@torch.no_grad()
def main(variant):
    state, slope_x, slope_y, width = sea()
    gauge = torch.zeros(4096, device=DEVICE)
    end = turns(20000, 150) * 0.076 * width
    before = state[0].sum().item()
    simulate = simulate_recorded if variant == "fixed" else simulate_asking
    state, steps = simulate(state, slope_x, slope_y, width, end, gauge)
    print(f"{steps} steps to {end:.2f} s, water kept {state[0].sum().item() / before:.5f}, highest at the gauge {gauge.max().item():.4f}")


if __name__ == "__main__":
    run(main)
