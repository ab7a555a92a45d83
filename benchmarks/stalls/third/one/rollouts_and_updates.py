"""Actor and critic on a grid of numpy worlds: a rollout of 64 moves, then four passes of updates, again and again."""
import numpy as np
import torch
import torch.nn as nn
from script import DEVICE, run, turns

from models import size

WORLDS, EDGE, MOVES, VIEW = size(256, 8), 16, size(64, 4), 9
STEP = [(0, 1), (0, -1), (1, 0), (-1, 0)]


class NumpyWorlds:
    """Each world has an agent that sees 9 by 9 cells around it and is paid for finding the goal."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.walls = self.random.random((WORLDS, EDGE + VIEW, EDGE + VIEW)) < 0.2
        self.place = self.random.integers(0, EDGE, (WORLDS, 2))
        self.goal = self.random.integers(0, EDGE, (WORLDS, 2))

    def look(self):
        views = np.stack([self.walls[i, y : y + VIEW, x : x + VIEW] for i, (y, x) in enumerate(self.place)])
        return np.concatenate([views.reshape(WORLDS, -1), (self.goal - self.place) / EDGE], 1).astype(np.float32)

    def move(self, actions):
        reward = np.zeros(WORLDS, dtype=np.float32)
        for i, action in enumerate(actions):
            self.place[i] = np.clip(self.place[i] + STEP[action], 0, EDGE - 1)
            if (self.place[i] == self.goal[i]).all():
                reward[i] = 1.0
                self.goal[i] = self.random.integers(0, EDGE, 2)
        return self.look(), reward


class DeviceWorlds:
    """The same worlds as tensors, all of them moved at once where the network is."""

    def __init__(self):
        self.walls = (torch.rand(WORLDS, EDGE + VIEW, EDGE + VIEW, device=DEVICE) < 0.2).float()
        self.place = torch.randint(0, EDGE, (WORLDS, 2), device=DEVICE)
        self.goal = torch.randint(0, EDGE, (WORLDS, 2), device=DEVICE)
        self.step = torch.tensor(STEP, device=DEVICE)
        self.window = torch.arange(VIEW, device=DEVICE)
        self.world = torch.arange(WORLDS, device=DEVICE)[:, None, None]

    def look(self):
        y, x = (self.place[:, axis, None] + self.window for axis in (0, 1))
        views = self.walls[self.world, y[:, :, None], x[:, None, :]]
        return torch.cat([views.flatten(1), (self.goal - self.place) / EDGE], 1)

    def move(self, actions):
        self.place = (self.place + self.step[actions]).clamp(0, EDGE - 1)
        found = (self.place == self.goal).all(1, keepdim=True)
        self.goal = torch.where(found, torch.randint_like(self.goal, EDGE), self.goal)
        return self.look(), found[:, 0].float()


def main(tick, fixed=False):
    torch.manual_seed(0)
    inputs, width = VIEW * VIEW + 2, size(512, 16)
    body = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()).to(DEVICE)
    actor, critic = nn.Linear(width, 4).to(DEVICE), nn.Linear(width, 1).to(DEVICE)
    parameters = [*body.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4)
    worlds = DeviceWorlds() if fixed else NumpyWorlds(0)
    seen = worlds.look() if fixed else torch.from_numpy(worlds.look()).to(DEVICE)
    for iteration in range(turns(45, 2)):
        views, moves, rewards = [], [], []
        with torch.no_grad():
            for _ in range(MOVES):
                action = torch.distributions.Categorical(logits=actor(body(seen)), validate_args=False).sample()
                views.append(seen), moves.append(action)
                if fixed:
                    seen, reward = worlds.move(action)
                else:
                    host, reward = worlds.move(action.cpu().numpy())  # STALL: host_work
                    seen, reward = torch.from_numpy(host).to(DEVICE), torch.from_numpy(reward).to(DEVICE)
                rewards.append(reward)
            returns, later = [], critic(body(seen)).squeeze(1)
            for reward in reversed(rewards):
                later = reward + 0.98 * later
                returns.append(later)
        x, a, r = torch.cat(views), torch.cat(moves), torch.cat(returns[::-1])
        for _ in range(4):
            for part in torch.randperm(len(x), device=DEVICE).chunk(4):
                hidden = body(x[part])
                policy = torch.distributions.Categorical(logits=actor(hidden), validate_args=False)
                gain = r[part] - critic(hidden).squeeze(1)
                loss = gain.square().mean() - (policy.log_prob(a[part]) * gain.detach()).mean() - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
