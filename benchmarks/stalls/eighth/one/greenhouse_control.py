"""Vents, heating and lamps of very many simulated greenhouses are learnt by soft actor-critic; the greenhouses live on the device."""
import argparse
import copy
import time

import torch
import torch.nn as nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SENSED, KNOBS, DAY = 6, 3, 200


class Greenhouses:
    """Warmth, damp, light, growth, weather and hour; a turn is five minutes in short pieces, and what breaks is begun anew."""

    def __init__(self, count, pieces):
        self.count, self.pieces = count, pieces
        self.state, self.age = self.fresh(count), torch.randint(0, DAY, (count,), device=DEVICE)
        self.days, self.lost = 0, 0

    def fresh(self, count):
        return torch.rand(count, SENSED, device=DEVICE) * 0.4 + 0.3

    def turn(self, knobs):
        vent, heat, lamp = (knobs * 0.5 + 0.5).unbind(1)
        state = self.state.clone()
        for _ in range(self.pieces):
            warm, damp, light, growth, weather, hour = state.unbind(1)
            flow = 0.2 * vent * (weather - warm) + 0.1 * heat + 0.05 * light - 0.04
            rate = torch.stack([flow, 0.1 * growth - 0.2 * vent * damp, lamp + hour.sin() - light, light * warm * damp, 0.3 * (hour.cos() - weather), torch.ones_like(hour)], 1)
            state = state + rate * 0.05
            self.thresholds(state)
        reward = state[:, 3] - self.state[:, 3] - 0.01 * knobs.square().sum(1) - (state[:, 0] - 0.6).abs() * 0.1
        self.age += 1
        spoiled = (state[:, 0] > 1.4) | (state[:, 0] < -0.6)
        self.state, seen = state, state.clone()
        self.begin_anew(spoiled, self.age >= DAY)
        return seen, reward, spoiled.float()

    def thresholds(self, state):
        drip = state[:, 1] > 1
        state[drip, 1] = 1 + 0.5 * (state[drip, 1] - 1)
        dark = state[:, 2] < 0
        state[dark, 2] *= 0.1
        if (state[:, 3] > 2).any():
            state[state[:, 3] > 2, 3] = 2.0

    def begin_anew(self, spoiled, over):
        ended = spoiled | over
        if ended.any():
            self.state[ended] = self.fresh(int(ended.sum()))
            self.age[ended] = 0
            self.days += int(over.sum())
            self.lost += int(spoiled.sum())


class GreenhousesWithoutMasks(Greenhouses):
    def thresholds(self, state):
        damp, light = state[:, 1], state[:, 2]
        damp.copy_(torch.where(damp > 1, 1 + 0.5 * (damp - 1), damp))
        light.copy_(torch.where(light < 0, 0.1 * light, light))
        state[:, 3].clamp_(max=2)

    def begin_anew(self, spoiled, over):
        ended = spoiled | over
        self.state = torch.where(ended[:, None], self.fresh(self.count), self.state)
        self.age.masked_fill_(ended, 0)
        self.days += over.sum()
        self.lost += spoiled.sum()


def net(entering, wide, leaving):
    return nn.Sequential(nn.Linear(entering, wide), nn.SiLU(), nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, leaving)).to(DEVICE)


class Learner:
    def __init__(self, wide):
        self.actor = net(SENSED, wide, 2 * KNOBS)
        self.critics = nn.ModuleList(net(SENSED + KNOBS, wide, 1) for _ in range(2))
        self.slow = copy.deepcopy(self.critics)
        fused = DEVICE == "cuda"
        self.acting = torch.optim.Adam(self.actor.parameters(), lr=3e-4, fused=fused)
        self.judging = torch.optim.Adam(self.critics.parameters(), lr=3e-4, fused=fused)

    def act(self, seen):
        middle, spread = self.actor(seen).chunk(2, 1)
        spread = spread.clamp(-5, 1)
        noise = torch.randn_like(middle)
        knobs = torch.tanh(middle + spread.exp() * noise)
        return knobs, (-0.5 * noise.square() - spread - torch.log1p(1e-4 - knobs.square())).sum(1)

    def learn(self, seen, knobs, reward, then, spoiled):
        with torch.no_grad():
            next_knobs, chance = self.act(then)
            both = torch.cat([then, next_knobs], 1)
            worth = reward + 0.98 * (1 - spoiled) * (torch.minimum(*(critic(both)[:, 0] for critic in self.slow)) - 0.02 * chance)
        both = torch.cat([seen, knobs], 1)
        wrong = sum((critic(both)[:, 0] - worth).square().mean() for critic in self.critics)
        self.judging.zero_grad()
        wrong.backward()
        self.judging.step()
        chosen, chance = self.act(seen)
        both = torch.cat([seen, chosen], 1)
        loss = (0.02 * chance - torch.minimum(*(critic(both)[:, 0] for critic in self.critics))).mean()
        self.acting.zero_grad()
        loss.backward()
        self.acting.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.slow.parameters()), list(self.critics.parameters()), 0.005)
        return wrong.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=300)
    options = parser.parse_args()
    count, pieces, wide, batch, kept = (50, 3, 16, 32, 4) if options.tiny else (8192, 30, 768, 12_288, 64)
    torch.manual_seed(0)
    start = time.perf_counter()
    houses = (GreenhousesWithoutMasks if options.fixed else Greenhouses)(count, pieces)
    learner = Learner(wide)
    memory = [torch.zeros(kept, count, *shape, device=DEVICE) for shape in ((SENSED,), (KNOBS,), (), (SENSED,), ())]
    total = torch.zeros((), device=DEVICE)
    for turn in range(options.turns):
        seen = houses.state
        with torch.no_grad():
            knobs, _ = learner.act(seen)
        then, reward, spoiled = houses.turn(knobs)
        for place, part in zip(memory, (seen, knobs, reward, then, spoiled)):
            place[turn % kept] = part
        rows = torch.randint(0, min(turn + 1, kept) * count, (batch,), device=DEVICE)
        total += learner.learn(*(place.flatten(0, 1)[rows] for place in memory))
        if turn % 100 == 99:
            print(f"{turn + 1}: critics wrong by {total.item() / (turn + 1):.5f}, reward {reward.mean().item():.5f}")
    print(f"{int(houses.days)} days ended, {int(houses.lost)} lost")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
