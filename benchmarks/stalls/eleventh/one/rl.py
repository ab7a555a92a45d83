"""PPO on a vectorised cart-pole written in numpy (one array per state variable)."""
import os
import sys
import time

import numpy as np
import torch
import torch.nn as nn

_t0 = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

N_ENVS = 16 if SMALL else 96
HORIZON = 32
ITERS = 20 if SMALL else 200
PPO_EPOCHS, MINIBATCHES = (2, 2) if SMALL else (4, 2)
GAMMA, LAM, CLIP = 0.99, 0.95, 0.2


class VecCartPole:
    def __init__(self, n, seed=0):
        self.n = n
        self.rng = np.random.default_rng(seed)
        self.state = np.zeros((n, 4), dtype=np.float32)
        self.t = np.zeros(n, dtype=np.int64)

    def _fresh(self, k):
        return self.rng.uniform(-0.05, 0.05, (k, 4)).astype(np.float32)

    def reset(self):
        self.state = self._fresh(self.n)
        self.t[:] = 0
        return self.state.copy()

    def step(self, action):
        x, xd, th, thd = self.state.T
        force = np.where(action == 1, 10.0, -10.0).astype(np.float32)
        cos, sin = np.cos(th), np.sin(th)
        tmp = (force + 0.05 * thd ** 2 * sin) / 1.1
        tha = (9.8 * sin - cos * tmp) / (0.5 * (4.0 / 3.0 - 0.1 * cos ** 2 / 1.1))
        xa = tmp - 0.05 * tha * cos / 1.1
        self.state = np.stack([x + 0.02 * xd, xd + 0.02 * xa, th + 0.02 * thd, thd + 0.02 * tha], 1)
        self.t += 1
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.209) | (self.t >= 500)
        k = int(done.sum())
        if k:
            self.state[done] = self._fresh(k)
            self.t[done] = 0
        return self.state.copy(), np.ones(self.n, dtype=np.float32), done


class ActorCritic(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi = nn.Linear(width, 2)
        self.v = nn.Linear(width, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h).log_softmax(-1), self.v(h).squeeze(-1)


def choose(logp):
    gumbel = -torch.empty_like(logp).exponential_().log()
    return (logp + gumbel).argmax(-1)


def rollout(env, model, obs):
    o_buf, a_buf, lp_buf, v_buf, r_buf, d_buf = [], [], [], [], [], []
    with torch.no_grad():
        for _ in range(HORIZON):
            o = torch.from_numpy(obs).to(device)
            logp, value = model(o)
            action = choose(logp)
            if FIXED:
                act = action.cpu().numpy()
            else:
                act = np.array([a.item() for a in action])  # FAULT
            obs, rew, done = env.step(act)
            o_buf.append(o)
            a_buf.append(action)
            lp_buf.append(logp)
            v_buf.append(value)
            r_buf.append(rew)
            d_buf.append(done)
        v_buf.append(model(torch.from_numpy(obs).to(device))[1])
    actions = torch.stack(a_buf)
    old_logp = torch.stack(lp_buf).gather(-1, actions[..., None]).squeeze(-1)
    values = torch.stack(v_buf).cpu().numpy()
    return obs, torch.stack(o_buf), actions, old_logp, values, np.stack(r_buf), np.stack(d_buf)


def gae(values, rewards, dones):
    adv = np.zeros_like(rewards)
    last = np.zeros(N_ENVS, dtype=np.float32)
    for t in range(HORIZON - 1, -1, -1):
        alive = 1.0 - dones[t].astype(np.float32)
        delta = rewards[t] + GAMMA * values[t + 1] * alive - values[t]
        last = delta + GAMMA * LAM * alive * last
        adv[t] = last
    return adv, adv + values[:-1]


def update(model, opt, obs, act, old_logp, adv, ret):
    n = obs.shape[0]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    total = torch.zeros((), device=device)
    for _ in range(PPO_EPOCHS):
        for idx in torch.randperm(n, device=device).chunk(MINIBATCHES):
            logp_all, v = model(obs[idx])
            logp = logp_all.gather(1, act[idx, None]).squeeze(1)
            ratio = (logp - old_logp[idx]).exp()
            a = adv[idx]
            pg = -torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
            ent = -(logp_all.exp() * logp_all).sum(1).mean()
            loss = pg + 0.5 * (v - ret[idx]).square().mean() - 0.01 * ent
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            total += loss.detach()
    return total / (PPO_EPOCHS * MINIBATCHES)


def main():
    torch.manual_seed(3)
    env = VecCartPole(N_ENVS)
    model = ActorCritic().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5, fused=device.type == "cuda")
    obs = env.reset()
    for it in range(ITERS):
        obs, o, a, lp, values, rew, done = rollout(env, model, obs)
        adv, ret = gae(values, rew, done)
        adv, ret = torch.from_numpy(adv).to(device).flatten(), torch.from_numpy(ret).to(device).flatten()
        loss = update(model, opt, o.flatten(0, 1), a.flatten(), lp.flatten(), adv, ret)
        if it % 20 == 0:
            mean_len = HORIZON * N_ENVS / max(1, int(done.sum()))
            print(f"iter {it:3d} loss {loss.item():8.3f} mean episode {mean_len:6.1f}", flush=True)


if __name__ == "__main__":
    main()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - _t0))
