"""Trains a robot to walk through corridors with PPO; between updates it plays, in 256 corridors at once.

"Half of my code is the simulation. Should I port it to C++?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
ROBOTS, HORIZON = 256, 28


class Corridors:
    """All robots move at once; one that reaches the end starts again."""

    def __init__(self):
        self.at, self.speed = torch.zeros(ROBOTS, 2), torch.zeros(ROBOTS, 2)
        self.bend = torch.rand(ROBOTS)

    def seen(self):
        return torch.cat([self.at, self.speed, self.bend[:, None]], 1)

    def step(self, push):
        self.speed = 0.9 * self.speed + 0.1 * push.clamp(-1, 1)
        self.at = self.at + 0.1 * self.speed
        wall = (self.at[:, 1] - self.bend * self.at[:, 0].sin()).abs()
        reward, over = self.speed[:, 0] - wall.clamp(max=2), self.at[:, 0] > 5
        self.at = torch.where(over[:, None], torch.zeros_like(self.at), self.at)
        return reward


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.push, self.worth = nn.Linear(256, 2), nn.Linear(256, 1)
        self.spread = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, seen):
        body = self.body(seen)
        return torch.distributions.Normal(self.push(body), self.spread.exp(), False), self.worth(body).squeeze(-1)


@torch.no_grad()
def play(agent, corridors):
    rows = []
    for _ in range(HORIZON):
        seen = corridors.seen()
        chosen, worth = agent(seen)
        push = chosen.sample()
        rows.append((seen, push, chosen.log_prob(push).sum(1), worth, corridors.step(push)))
    seen, push, told, worth, reward = (torch.stack(column) for column in zip(*rows, strict=True))
    gained, after = torch.zeros_like(reward), agent(corridors.seen())[1]
    running = torch.zeros(ROBOTS)
    for at in reversed(range(HORIZON)):
        running = reward[at] + 0.98 * after - worth[at] + 0.98 * 0.95 * running
        gained[at], after = running, worth[at]
    return [each.flatten(0, 1) for each in (seen, push, told, gained, gained + worth)]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    agent, corridors = Agent(), Corridors()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        played = play(agent, corridors)
        for _ in range(4):
            for rows in torch.randperm(ROBOTS * HORIZON).chunk(4):
                seen, push, told, gained, returned = (each[rows] for each in played)
                chosen, worth = agent(seen)
                ratio = (chosen.log_prob(push).sum(1) - told).exp()
                gained = (gained - gained.mean()) / (gained.std() + 1e-8)
                loss = -torch.minimum(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean()
                loss = loss + 0.5 * (worth - returned).square().mean() - 0.01 * chosen.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
