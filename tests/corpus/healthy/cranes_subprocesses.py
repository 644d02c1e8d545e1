"""Trains an actor and a critic to swing loads with cranes; the cranes are simulated in two processes of their own.

It learns on-policy: the next push needs what the cranes answered, and the next round needs the policy of now.

"Should I give each crane a process of its own?"
"""

import math
import multiprocessing
import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
PROCESSES, CRANES, HORIZON = 2, 12, 24


class Crane:
    """A trolley with a load on a rope, in ten small steps of time for each push."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.start()

    def start(self):
        self.at, self.speed = self.rng.uniform(-1, 1), 0.0
        self.angle, self.turn, self.age = self.rng.uniform(-0.4, 0.4), 0.0, 0

    def seen(self):
        return self.at, self.speed, math.sin(self.angle), math.cos(self.angle), self.turn

    def push(self, force):
        for _ in range(10):
            pull = 4.0 * max(-1.0, min(1.0, force)) - 0.3 * self.speed
            swing = -9.81 * math.sin(self.angle) - pull * math.cos(self.angle) - 0.1 * self.turn
            self.speed += 0.01 * pull
            self.at += 0.01 * self.speed
            self.turn += 0.01 * swing
            self.angle += 0.01 * self.turn
        self.age += 1
        reward = 1.0 - self.at**2 - self.angle**2
        over = self.age > 200 or abs(self.at) > 3
        if over:
            self.start()
        return self.seen(), reward, over


def simulate(pipe, seed):
    cranes = [Crane(seed + number) for number in range(CRANES)]
    pipe.send([(crane.seen(), 0.0, False) for crane in cranes])
    while (pushes := pipe.recv()) is not None:
        pipe.send([crane.push(force) for crane, force in zip(cranes, pushes, strict=True)])


class Cranes:
    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.pipes = []
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            context.Process(target=simulate, args=(theirs, 100 * number), daemon=True).start()
            self.pipes.append(ours)

    def answers(self):
        rows = []
        for pipe in self.pipes:
            rows += pipe.recv()
        seen, reward, over = zip(*rows, strict=True)
        return torch.tensor(seen), torch.tensor(reward), torch.tensor(over)

    def push(self, forces):
        for pipe, part in zip(self.pipes, forces.view(PROCESSES, CRANES).tolist(), strict=True):
            pipe.send(part)
        return self.answers()

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.force, self.worth = nn.Linear(256, 1), nn.Linear(256, 1)
        self.spread = nn.Parameter(torch.tensor(-0.5))

    def forward(self, seen):
        body = self.body(seen)
        return torch.distributions.Normal(self.force(body)[:, 0], self.spread.exp(), False), self.worth(body)[:, 0]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cranes, agent = Cranes(), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)
    seen = cranes.answers()[0]
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = []
        with torch.no_grad():
            for _ in range(HORIZON):
                chosen, worth = agent(seen)
                force = chosen.sample()
                then, reward, over = cranes.push(force)
                rows.append((seen, force, worth, reward, over))
                seen = then
            after = agent(seen)[1]
        before, force, worth, reward, over = (torch.stack(column) for column in zip(*rows, strict=True))
        returned = torch.zeros_like(reward)
        for at in reversed(range(HORIZON)):
            after = returned[at] = reward[at] + 0.97 * after * ~over[at]
        chosen, judged = agent(before.flatten(0, 1))
        gained = (returned - worth).flatten()
        gained = (gained - gained.mean()) / (gained.std() + 1e-6)
        loss = 0.5 * (judged - returned.flatten()).square().mean()
        loss = loss - (chosen.log_prob(force.flatten()) * gained).mean() - 0.01 * chosen.entropy().mean()
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
    cranes.close()
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
