"""PPO for keeping the levels of coupled water tanks, eight simulated plants side by side.

One step is a whole iteration: roll-out, advantages, three epochs of minibatches.

"The simulator is a few lines of numpy for all plants together, the networks are two small MLPs. Profiling
says lots of aten::mul, aten::select and aten::add, which is what neural networks do, I suppose?"
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

ENVS, HORIZON, OBS, ACT = 8, 48, 6, 2
GAMMA, LAM, CLIP = 0.99, 0.95, 0.2


class Tanks:
    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.level = self.rng.uniform(0, 1, (ENVS, 3)).astype(np.float32)
        self.goal = self.rng.uniform(0.2, 0.8, (ENVS, 3)).astype(np.float32)
        self.age = self.rng.integers(0, 100, ENVS)

    def observe(self):
        return torch.from_numpy(np.concatenate([self.level, self.goal], 1))

    def step(self, action):
        a = np.clip(action, -1, 1)
        flow = 0.1 * (self.level[:, :2] - self.level[:, 1:])
        self.level[:, :2] += 0.1 * a - flow
        self.level[:, 1:] += flow
        self.level += 0.005 * self.rng.standard_normal((ENVS, 3), dtype=np.float32)
        reward = -np.abs(self.level - self.goal).sum(1)
        self.age += 1
        done = self.age >= 100
        if done.any():
            self.level[done] = self.rng.uniform(0, 1, (int(done.sum()), 3))
            self.goal[done] = self.rng.uniform(0.2, 0.8, (int(done.sum()), 3))
            self.age[done] = 0
        return torch.from_numpy(reward), torch.from_numpy(done.astype(np.float32))


def mlp(out):
    return nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi, self.v = mlp(ACT), mlp(1)
        self.log_std = nn.Parameter(torch.full((ACT,), -0.5))

    def logp(self, mean, act):
        z = (act - mean) / self.log_std.exp()
        return (-0.5 * z.square() - self.log_std).sum(-1)


def advantages(rew, done, val):
    adv = torch.zeros(HORIZON, ENVS)
    if CURED:
        last = torch.zeros(ENVS)
        for t in reversed(range(HORIZON)):
            delta = rew[t] + GAMMA * val[t + 1] * (1 - done[t]) - val[t]
            last = delta + GAMMA * LAM * (1 - done[t]) * last
            adv[t] = last
        return adv
    for e in range(ENVS):  # cause: hot-line
        last = 0.0
        for t in reversed(range(HORIZON)):
            delta = rew[t, e] + GAMMA * val[t + 1, e] * (1 - done[t, e]) - val[t, e]
            last = delta + GAMMA * LAM * (1 - done[t, e]) * last
            adv[t, e] = last
    return adv


@torch.no_grad()
def rollout(env, agent):
    obs, act, lp, rew, done = [], [], [], [], []
    for _ in range(HORIZON):
        o = env.observe()
        mean = agent.pi(o)
        a = mean + agent.log_std.exp() * torch.randn_like(mean)
        r, d = env.step(a.numpy())
        for store, item in zip((obs, act, lp, rew, done), (o, a, agent.logp(mean, a), r, d), strict=False):
            store.append(item)
    obs.append(env.observe())
    val = agent.v(torch.stack(obs)).squeeze(-1)
    rew, done = torch.stack(rew), torch.stack(done)
    adv = advantages(rew, done, val)
    flat = [torch.stack(obs[:-1]), torch.stack(act), torch.stack(lp), adv, adv + val[:-1]]
    return [x.flatten(0, 1) for x in flat]


def update(agent, opt, batch):
    for _ in range(3):
        for idx in torch.randperm(ENVS * HORIZON).split(192):
            o, a, lp, adv, ret = (x[idx] for x in batch)
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            ratio = (agent.logp(agent.pi(o), a) - lp).exp()
            surr = torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
            loss = 0.5 * (agent.v(o).squeeze(-1) - ret).square().mean() - surr - 0.01 * agent.log_std.sum()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    env, agent = Tanks(), Agent()
    opt = torch.optim.Adam(agent.parameters(), lr=3e-4, fused=True)
    begin, its, mark = time.perf_counter(), 0, None
    while True:
        update(agent, opt, rollout(env, agent))
        its += 1
        now = time.perf_counter() - begin
        if mark is None and now > 2:
            mark = its, now
        if now > SECONDS:
            break
    updates = (its - mark[0]) * 3 * (ENVS * HORIZON // 192)
    print(f"step_ms {(now - mark[1]) * 1000 / updates:.3f}", flush=True)
