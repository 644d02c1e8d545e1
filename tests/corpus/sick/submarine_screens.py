"""Trains a Q-network that plays a game with a submarine; the replay memory keeps its screens compressed.

"Without the compression I need 7 GB of memory, and zlib is written in C."
"""

import os
import random
import time
import zlib

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SIZE, GAMES = 84, 48


class Memory:
    def __init__(self, limit):
        self.limit, self.kept, self.at = limit, [], 0

    def packed(self, screen):
        if CURED:
            return screen
        return zlib.compress(screen.tobytes(), 6)  # cause: hot-line

    def unpacked(self, kept):
        return kept if CURED else np.frombuffer(zlib.decompress(kept), np.uint8).reshape(SIZE, SIZE)  # cause: hot-line

    def add(self, screen, action, reward):
        entry = self.packed(screen), action, reward
        if len(self.kept) < self.limit:
            self.kept.append(entry)
        else:
            self.kept[self.at] = entry
            self.at = (self.at + 1) % self.limit

    def sample(self, count):
        places = [random.randrange(len(self.kept) - 1) for _ in range(count)]
        screens = np.stack([self.unpacked(self.kept[place][0]) for place in places])
        after = np.stack([self.unpacked(self.kept[place + 1][0]) for place in places])
        actions = torch.tensor([self.kept[place][1] for place in places])
        rewards = torch.tensor([self.kept[place][2] for place in places])
        return as_input(screens), actions, rewards, as_input(after)


def as_input(screens):
    return torch.from_numpy(screens)[:, None].float() / 255


class Sea:
    """Forty-eight games at a time, drawn with some noise of the waves."""

    def __init__(self):
        self.chance = np.random.default_rng(2)
        self.waves = self.chance.integers(0, 24, (64, SIZE, SIZE), dtype=np.uint8)
        self.place = np.full((GAMES, 2), SIZE // 2)

    def screens(self):
        drawn = self.waves[self.chance.integers(0, 64, GAMES)]
        for screen, (y, x) in zip(drawn, self.place, strict=True):
            screen[y - 4 : y + 4, x - 8 : x + 8] = 250
        return drawn

    def move(self, actions):
        self.place[:, 0] = np.clip(self.place[:, 0] + actions % 3 - 1, 8, SIZE - 8)
        self.place[:, 1] = np.clip(self.place[:, 1] + actions // 3 - 1, 8, SIZE - 8)
        return -np.abs(self.place - SIZE // 2).sum(1) / SIZE


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 81, 256),
        nn.ReLU(),
        nn.Linear(256, 9),
    )


def main():
    torch.set_num_threads(1)
    online, target, sea, memory = network(), network(), Sea(), Memory(4000)
    optimizer = torch.optim.Adam(online.parameters(), 1e-4)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        screens = sea.screens()
        with torch.no_grad():
            actions = online(as_input(screens)).argmax(1).numpy()
        actions = np.where(np.random.rand(GAMES) < 0.1, np.random.randint(0, 9, GAMES), actions)
        for screen, action, reward in zip(screens, actions.tolist(), sea.move(actions).tolist(), strict=True):
            memory.add(screen, action, reward)
        before, actions, rewards, after = memory.sample(32)
        with torch.no_grad():
            goal = rewards + 0.98 * target(after).amax(1)
        told = online(before).gather(1, actions[:, None]).squeeze(1)
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(told, goal).backward()
        optimizer.step()
        step += 1
        if step % 250 == 0:
            target.load_state_dict(online.state_dict())
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
