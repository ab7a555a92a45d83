"""Actor-critic: every action goes home to an environment in NumPy and every observation back to the GPU."""
import numpy as np
import torch
import torch.nn as nn

from models import STEPS, run, size

ENVS, ROLLOUT = size(2048, 8), size(16, 3)


class HostEnv:
    def __init__(self):
        self.state = np.random.default_rng(0).normal(size=(ENVS, 16)).astype(np.float32)

    def step(self, action):
        push = np.eye(4, dtype=np.float32)[action] @ np.ones((4, 16), np.float32)
        self.state = np.tanh(0.9 * self.state + 0.1 * push + 0.01 * np.roll(self.state, 1, axis=1))
        return self.state, -np.square(self.state).sum(1)


class DeviceEnv:
    def __init__(self):
        self.state = torch.randn(ENVS, 16, device="cuda")

    def step(self, action):
        push = torch.nn.functional.one_hot(action, 4).float().sum(1, keepdim=True)
        self.state = torch.tanh(0.9 * self.state + 0.1 * push + 0.01 * self.state.roll(1, 1))
        return self.state, -self.state.square().sum(1)


def main(tick, fixed=False):
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 5)).to("cuda")
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    env = DeviceEnv() if fixed else HostEnv()
    observed = torch.zeros(ENVS, 16, device="cuda")
    for step in range(STEPS):
        log_probs, values, rewards = [], [], []
        for _ in range(ROLLOUT):
            out = actor(observed)
            policy = torch.distributions.Categorical(logits=out[:, :4], validate_args=False)
            action = policy.sample()
            if fixed:
                observed, reward = env.step(action)
            else:
                state, reward = env.step(action.cpu().numpy())  # STALL: host_work
                observed, reward = torch.from_numpy(state).to("cuda"), torch.from_numpy(reward).to("cuda")  # STALL: blocking_copy
            log_probs.append(policy.log_prob(action)), values.append(out[:, 4]), rewards.append(reward)
        values, rewards = torch.stack(values), torch.stack(rewards)
        advantage = rewards - values
        loss = -(torch.stack(log_probs) * advantage.detach()).mean() + advantage.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
