"""Teaches kites to stay in the wind with deep Q-learning; between two updates all kites fly on with the newest network.

The network chooses where the kites fly, and the memory learns from where they have been: what is collected after an
update is drawn from in the next one.

"Half of the time it flies kites. But where should the experience come from?"
"""

import copy
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
KITES, TURNS, ROOM, BATCH, PULLS = 128, 12, 40_000, 256, 3


class Kites:
    """Angle, turn rate and height of each, in gusts."""

    def __init__(self):
        self.angle, self.rate = torch.zeros(KITES), torch.zeros(KITES)
        self.height, self.gust = torch.ones(KITES), torch.zeros(KITES)

    def seen(self):
        return torch.stack([self.angle.sin(), self.angle.cos(), self.rate, self.height], 1)

    def pull(self, line):
        self.gust = 0.9 * self.gust + 0.2 * torch.randn(KITES)
        self.rate = 0.95 * self.rate + 0.1 * (line - 1.0) + 0.05 * self.gust * self.angle.cos()
        self.angle = self.angle + 0.1 * self.rate
        self.height = (self.height + 0.05 * self.angle.cos() - 0.02 * self.rate.abs()).clamp(0, 5)
        fallen = self.height <= 0
        self.height = torch.where(fallen, torch.ones(()), self.height)
        self.angle = torch.where(fallen, torch.zeros(()), self.angle)
        return self.height - 5.0 * fallen


class Memory:
    def __init__(self):
        self.rows = torch.zeros(ROOM, 10)
        self.at = self.count = 0

    def add(self, rows):
        places = (self.at + torch.arange(len(rows))) % ROOM
        self.rows[places] = rows
        self.at = (self.at + len(rows)) % ROOM
        self.count = min(ROOM, self.count + len(rows))

    def draw(self, count):
        rows = self.rows[torch.randint(self.count, (count,))]
        return rows[:, :4], rows[:, 4].long(), rows[:, 5], rows[:, 6:]


@torch.no_grad()
def collect(kites, network, memory):
    """Let all kites fly some turns, now and then by chance."""
    for _ in range(TURNS):
        seen = kites.seen()
        best = network(seen).argmax(1)
        line = torch.where(torch.rand(KITES) < 0.1, torch.randint(PULLS, (KITES,)), best)
        reward = kites.pull(line)
        memory.add(torch.cat([seen, line[:, None], reward[:, None], kites.seen()], 1))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, PULLS))
    slow = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-4)
    kites, memory = Kites(), Memory()
    for _ in range(5):
        collect(kites, network, memory)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        seen, line, reward, then = memory.draw(BATCH)
        with torch.no_grad():
            wanted = reward + 0.97 * slow(then).amax(1)
        loss = nn.functional.smooth_l1_loss(network(seen).gather(1, line[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collect(kites, network, memory)
        step += 1
        if step % 200 == 0:
            slow.load_state_dict(network.state_dict())
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
