"""Trains a policy of the lifts of a skyscraper with policy gradients; the building is simulated in plain Python.

"The simulation has no more than additions. Should I buy a GPU for the network?"
"""

import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
FLOORS = 60


class Building:
    """People wait on its floors; the lift goes to one of them, and takes twelve."""

    def __init__(self):
        self.waiting = [0.0] * FLOORS

    def step(self, floor):
        taken = min(12.0, self.waiting[floor])
        self.waiting[floor] -= taken
        self.waiting = [min(40.0, count + 0.3 * random.random()) for count in self.waiting]  # cause: hot-line
        return self.waiting, taken


class Buildings:
    def __init__(self, count):
        self.all = [Building() for _ in range(count)]

    def step(self, floors):
        states, rewards = [], []
        for building, floor in zip(self.all, floors.tolist(), strict=True):
            state, reward = building.step(floor)
            states.append(state)
            rewards.append(reward)
        return torch.tensor(states), torch.tensor(rewards)


class BuildingsAtOnce:
    def __init__(self, count):
        self.waiting = torch.zeros(count, FLOORS)

    def step(self, floors):
        taken = self.waiting.gather(1, floors[:, None]).clamp(max=12)
        self.waiting = self.waiting.scatter_add(1, floors[:, None], -taken)
        self.waiting = (self.waiting + 0.3 * torch.rand_like(self.waiting)).clamp(max=40)
        return self.waiting, taken.squeeze(1)


def main():
    torch.set_num_threads(1)
    policy = nn.Sequential(nn.Linear(FLOORS, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, FLOORS))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    town = (BuildingsAtOnce if CURED else Buildings)(384)
    state, baseline = torch.zeros(384, FLOORS), 0.0
    began, warm, step = time.perf_counter(), None, 0
    while True:
        choice = torch.distributions.Categorical(logits=policy(state))
        floors = choice.sample()
        state, rewards = town.step(floors)
        baseline = 0.99 * baseline + 0.01 * rewards.mean()
        loss = -(choice.log_prob(floors) * (rewards - baseline)).mean() - 0.01 * choice.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
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
