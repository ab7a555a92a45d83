"""A DQN on 32 games of catch at once; the replay and its sum tree, which prefers what surprised, are kept on the host."""
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import size

GAMES, BATCH, KEPT, EDGE = size(32, 2), size(512, 4), size(8192, 64), 84


class Catch:
    """A ball falls, a paddle below moves left, stays or moves right."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.ball, self.paddle = np.zeros((GAMES, 2), int), np.full(GAMES, EDGE // 2)
        self.frames = np.zeros((GAMES, 4, EDGE, EDGE), np.uint8)
        self.ball[:, 1] = self.rng.integers(0, EDGE, GAMES)

    def step(self, actions):
        self.paddle = np.clip(self.paddle + 4 * (actions - 1), 4, EDGE - 5)
        self.ball[:, 0] += 3
        done = self.ball[:, 0] >= EDGE - 1
        rewards = np.where(done, np.where(abs(self.ball[:, 1] - self.paddle) < 6, 1.0, -1.0), 0.0).astype(np.float32)
        self.ball[done] = np.stack([np.zeros(done.sum(), int), self.rng.integers(0, EDGE, done.sum())], 1)
        self.frames = np.roll(self.frames, -1, axis=1)
        self.frames[:, 3] = 0
        self.frames[np.arange(GAMES), 3, self.ball[:, 0], self.ball[:, 1]] = 255
        for shift in range(-4, 5):
            self.frames[np.arange(GAMES), 3, EDGE - 2, self.paddle + shift] = 255
        return self.frames, rewards, done


class HostReplay:
    def __init__(self):
        self.states, self.following = np.zeros((2, KEPT, 4, EDGE, EDGE), np.uint8)
        self.actions, self.rewards, self.done = np.zeros(KEPT, np.int64), np.zeros(KEPT, np.float32), np.zeros(KEPT, np.float32)
        self.tree, self.place, self.random = [0.0] * (2 * KEPT), 0, random.Random(0)

    def set(self, slot, priority):
        slot += KEPT
        change = priority - self.tree[slot]
        while slot:
            self.tree[slot] += change
            slot //= 2

    def add(self, states, actions, rewards, following, done):
        slots = (self.place + np.arange(len(actions))) % KEPT
        self.states[slots], self.actions[slots], self.rewards[slots] = states, actions, rewards
        self.following[slots], self.done[slots] = following, done
        for slot in slots.tolist():
            self.set(slot, 1.0)
        self.place = (self.place + len(actions)) % KEPT

    def sample(self):
        slots = []
        for _ in range(BATCH):
            left, slot = self.random.random() * self.tree[1], 1
            while slot < KEPT:
                slot *= 2
                if left > self.tree[slot]:
                    left -= self.tree[slot]
                    slot += 1
            slots.append(slot - KEPT)
        parts = (self.states, self.actions, self.rewards, self.following, self.done)
        return slots, [torch.from_numpy(part[slots]).to(DEVICE) for part in parts]  # STALL: blocking_copy

    def surprise(self, slots, errors):
        for slot, error in zip(slots, errors.cpu().tolist()):  # STALL: host_sync
            self.set(slot, (error + 0.01) ** 0.6)


class DeviceReplay:
    """The same in device memory; a running sum takes the tree's place."""

    def __init__(self):
        with torch.device(DEVICE):
            self.states, self.following = torch.zeros(2, KEPT, 4, EDGE, EDGE, dtype=torch.uint8)
            self.actions, self.rewards, self.done = torch.zeros(KEPT, dtype=torch.long), torch.zeros(KEPT), torch.zeros(KEPT)
            self.priorities = torch.zeros(KEPT)
        self.place = 0

    def add(self, *parts):
        span = slice(self.place, self.place + GAMES)
        for kept, part in zip((self.states, self.actions, self.rewards, self.following, self.done), parts):
            kept[span] = torch.as_tensor(part, dtype=kept.dtype).to(DEVICE)
        self.priorities[span] = 1.0
        self.place = (self.place + GAMES) % KEPT

    def sample(self):
        running = self.priorities.cumsum(0)
        slots = torch.searchsorted(running, torch.rand(BATCH, device=DEVICE) * running[-1]).clamp(max=KEPT - 1)
        return slots, [part[slots] for part in (self.states, self.actions, self.rewards, self.following, self.done)]

    def surprise(self, slots, errors):
        self.priorities[slots] = (errors + 0.01) ** 0.6


def network():
    wide = size(64, 4)
    return nn.Sequential(
        nn.Conv2d(4, wide, 8, 4), nn.ReLU(), nn.Conv2d(wide, 2 * wide, 4, 2), nn.ReLU(), nn.Conv2d(2 * wide, 2 * wide, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(98 * wide, 512), nn.ReLU(), nn.Linear(512, 3),
    ).to(DEVICE)


def main(tick, fixed=False):
    torch.manual_seed(0)
    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    game, replay = Catch(), DeviceReplay() if fixed else HostReplay()
    states, chooser = game.frames, np.random.default_rng(1)
    for step in range(turns(420, 3)):
        with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
            chosen = online(torch.from_numpy(states).to(DEVICE).float() / 255).argmax(1).cpu().numpy()
        actions = np.where(chooser.random(GAMES) < 0.1, chooser.integers(0, 3, GAMES), chosen)
        following, rewards, done = game.step(actions)
        replay.add(states, actions, rewards, following, done)
        states = following
        slots, (x, action, reward, after, ended) = replay.sample()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            value = online(x.float() / 255).gather(1, action[:, None])[:, 0].float()
            with torch.no_grad():
                best = online(after.float() / 255).argmax(1, keepdim=True)
                goal = reward + 0.99 * (1 - ended) * target(after.float() / 255).gather(1, best)[:, 0].float()
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.surprise(slots, (value - goal).detach().abs())
        if step % 100 == 99:
            target.load_state_dict(online.state_dict())
        tick()


if __name__ == "__main__":
    run(main)
