"""PPO controller for a simulated greenhouse (heating, vents, lamps).

"I simulate 32 greenhouses at once, so I bet collecting experience is the slow
part: RL is always bound by the environment. Should I write the simulator in C?"
"""

import copy
import os
import time

import torch
from torch import nn
from torch.distributions import Normal

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

N_ENV, HORIZON, OBS, ACT = 32, 40, 24, 3
EPOCHS, MINIBATCH, CLIP, GAMMA, LAM = 4, 160, 0.2, 0.98, 0.95


class Greenhouses:
    def __init__(self, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.drift = torch.randn(OBS, OBS, generator=self.g) * 0.05
        self.effect = torch.randn(ACT, OBS, generator=self.g) * 0.3
        self.state = torch.randn(N_ENV, OBS, generator=self.g)

    def step(self, action):
        weather = 0.1 * torch.randn(N_ENV, OBS, generator=self.g)
        self.state = (0.9 * self.state + self.state @ self.drift + action.tanh() @ self.effect + weather).clamp(-5, 5)
        return self.state, -self.state[:, :6].pow(2).mean(1) - 0.01 * action.pow(2).mean(1)


class ActorCritic(nn.Module):
    def __init__(self, h=320):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh())
        self.mu = nn.Linear(h, ACT)
        self.v = nn.Linear(h, 1)
        self.log_std = nn.Parameter(torch.zeros(ACT) - 0.5)

    def forward(self, obs):
        z = self.trunk(obs)
        return Normal(self.mu(z), self.log_std.exp()), self.v(z).squeeze(-1)


@torch.no_grad()
def collect(policy, env):
    obs, act, rew, val = [], [], [], []
    for _ in range(HORIZON):
        dist, v = policy(env.state)
        a = dist.sample()
        obs.append(env.state)
        _, r = env.step(a)
        act.append(a)
        rew.append(r)
        val.append(v)
    val.append(policy(env.state)[1])
    adv, last = [], torch.zeros(N_ENV)
    for t in reversed(range(HORIZON)):
        delta = rew[t] + GAMMA * val[t + 1] - val[t]
        last = delta + GAMMA * LAM * last
        adv.append(last)
    adv = torch.stack(adv[::-1])
    ret = adv + torch.stack(val[:-1])
    return torch.cat(obs), torch.cat(act), adv.flatten(), ret.flatten(), torch.stack(rew).mean().item()


def log_prob(policy, obs, act):
    with torch.no_grad():
        return policy(obs)[0].log_prob(act).sum(-1)


def main():
    torch.manual_seed(0)
    env, policy = Greenhouses(), ActorCritic()
    old = copy.deepcopy(policy)
    opt = torch.optim.Adam(policy.parameters(), lr=3e-4)
    t_start = time.time()
    updates, mark, rounds = 0, None, 0
    while time.time() - t_start < SECONDS:
        old.load_state_dict(policy.state_dict())
        obs, act, adv, ret, reward = collect(policy, env)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        if CURED:
            old_logp = log_prob(old, obs, act)
        for _ in range(EPOCHS):
            for mb in torch.randperm(len(obs)).split(MINIBATCH):
                if not CURED:
                    old_logp = log_prob(old, obs, act)  # cause: hot-line
                dist, value = policy(obs[mb])
                ratio = (dist.log_prob(act[mb]).sum(-1) - old_logp[mb]).exp()
                gain = torch.min(ratio * adv[mb], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[mb]).mean()
                loss = -gain + 0.5 * (value - ret[mb]).pow(2).mean() - 1e-3 * dist.entropy().mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                opt.step()
                updates += 1
            if mark is None and time.time() - t_start > 2:
                mark = time.time(), updates
        rounds += 1
        if rounds % 10 == 0:
            print(f"round {rounds} reward {reward:.4f}")
    print(f"step_ms {(time.time() - mark[0]) / (updates - mark[1]) * 1000:.3f}")


if __name__ == "__main__":
    main()
