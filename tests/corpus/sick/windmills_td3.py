"""Turns windmills into the wind with TD3 from a replay memory; what the mills see is scaled to mean 0 and deviation 1.

"The networks are tiny. Is Python slow, or PyTorch?"
"""

import copy
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
MILLS, SEEN, TURNS, PLACES, BATCH = 16, 24, 3, 10_000, 128


class Mills:
    def __init__(self):
        self.state = torch.randn(MILLS, SEEN)
        self.mix = torch.randn(SEEN, SEEN) / SEEN**0.5
        self.push = torch.randn(TURNS, SEEN) * 0.3

    def go(self, turns):
        wind = 0.2 * torch.randn(MILLS, SEEN)
        self.state = 0.9 * torch.tanh(self.state @ self.mix) + turns @ self.push + wind
        return self.state[:, 0] - 0.1 * turns.square().sum(1)


class Memory:
    def __init__(self):
        self.seen, self.then = torch.zeros(PLACES, SEEN), torch.zeros(PLACES, SEEN)
        self.turns, self.reward, self.count = torch.zeros(PLACES, TURNS), torch.zeros(PLACES), 0
        self.sums = torch.zeros(2, SEEN, dtype=torch.float64)

    def __len__(self):
        return min(self.count, PLACES)

    def add(self, seen, turns, reward, then):
        at = torch.arange(self.count, self.count + len(seen)) % PLACES
        if CURED:
            old = self.seen[at].double()
            new = seen.double()
            self.sums += torch.stack([new.sum(0) - old.sum(0), new.square().sum(0) - old.square().sum(0)])
        self.seen[at], self.turns[at], self.reward[at], self.then[at] = seen, turns, reward, then
        self.count += len(seen)

    def scale(self):
        if CURED:
            mean, square = self.sums / len(self)
            return mean.float(), (square - mean.square()).clamp(min=1e-6).sqrt().float()
        known = self.seen[: len(self)]
        return known.mean(0), known.std(0).clamp(min=1e-3)  # cause: hot-line

    def draw(self):
        rows = torch.randint(len(self), (BATCH,))
        mean, deviation = self.scale()
        seen, then = ((known[rows] - mean) / deviation for known in (self.seen, self.then))
        return seen, self.turns[rows], self.reward[rows], then


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, outputs))


class Agent:
    def __init__(self):
        self.actor, self.critics = net(SEEN, TURNS), nn.ModuleList(net(SEEN + TURNS, 1) for _ in range(2))
        self.actor_then, self.critics_then = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.of_critics = torch.optim.Adam(self.critics.parameters(), lr=3e-4)
        self.memory, self.mills, self.updates = Memory(), Mills(), 0

    @torch.no_grad()
    def act(self, noise=0.1):
        seen = self.mills.state
        if self.memory.count:
            mean, deviation = self.memory.scale()
            turns = torch.tanh(self.actor((seen - mean) / deviation))
        else:
            turns = torch.zeros(MILLS, TURNS)
        turns = (turns + noise * torch.randn_like(turns)).clamp(-1, 1)
        reward = self.mills.go(turns)
        self.memory.add(seen, turns, reward, self.mills.state)

    def train_step(self):
        self.act()
        seen, turns, reward, then = self.memory.draw()
        with torch.no_grad():
            next_turns = torch.tanh(self.actor_then(then))
            next_turns = (next_turns + (0.2 * torch.randn_like(next_turns)).clamp(-0.5, 0.5)).clamp(-1, 1)
            worth = torch.min(*[critic(torch.cat([then, next_turns], 1)) for critic in self.critics_then])
            wanted = reward + 0.98 * worth[:, 0]
        both = torch.cat([seen, turns], 1)
        loss = sum(nn.functional.mse_loss(critic(both)[:, 0], wanted) for critic in self.critics)
        self.of_critics.zero_grad()
        loss.backward()
        self.of_critics.step()
        self.updates += 1
        if self.updates % 2 == 0:
            actor_loss = -self.critics[0](torch.cat([seen, torch.tanh(self.actor(seen))], 1)).mean()
            self.of_actor.zero_grad()
            actor_loss.backward()
            self.of_actor.step()
            with torch.no_grad():
                slow = [*self.actor_then.parameters(), *self.critics_then.parameters()]
                torch._foreach_lerp_(slow, [*self.actor.parameters(), *self.critics.parameters()], 0.01)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    agent = Agent()
    for _ in range(PLACES // MILLS):
        agent.act(noise=1.0)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        agent.train_step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
