"""Trains a Q-network of a drone from a replay memory that ranks its transitions by their last error.

"The network has three layers. Why does a step take as long as a small ResNet?"
"""

import os
import random
import time
from operator import attrgetter

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Transition:
    __slots__ = ("action", "error", "next_state", "reward", "state")

    def __init__(self, state, action, reward, next_state):
        self.state, self.action, self.reward, self.next_state = state, action, reward, next_state
        self.error = 1.0 + random.random()


class Replay:
    def __init__(self, size):
        self.size, self.memory, self.ranked, self.draws, self.at = size, [], [], 0, 0

    def add(self, transition):
        if len(self.memory) < self.size:
            self.memory.append(transition)
        else:
            self.memory[self.at] = transition
        self.at = (self.at + 1) % self.size

    def sample(self, count):
        if not CURED or self.draws % 500 == 0:
            self.ranked = sorted(self.memory, key=attrgetter("error"), reverse=True)  # cause: hot-line
        self.draws += 1
        return [self.ranked[int(len(self.ranked) * random.random() ** 2)] for _ in range(count)]


class Drone:
    """Six numbers, four rotors."""

    def __init__(self):
        self.state = torch.zeros(6)

    def act(self, rotor):
        before = self.state
        push = torch.zeros(6)
        push[rotor] = 0.1
        self.state = (0.95 * before + push + 0.02 * torch.randn(6)).clamp(-1, 1)
        return before, rotor, -self.state.square().sum(), self.state


def learn(online, target, optimizer, batch, gamma=0.97):
    states, next_states = torch.stack([t.state for t in batch]), torch.stack([t.next_state for t in batch])
    actions, rewards = torch.tensor([t.action for t in batch]), torch.stack([t.reward for t in batch])
    with torch.no_grad():
        goal = rewards + gamma * target(next_states).amax(1)
    error = goal - online(states).gather(1, actions[:, None]).squeeze(1)
    optimizer.zero_grad()
    nn.functional.huber_loss(error, torch.zeros_like(error)).backward()
    optimizer.step()
    for transition, size in zip(batch, error.detach().abs().tolist(), strict=True):
        transition.error = size


def network():
    return nn.Sequential(nn.Linear(6, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 4))


def main():
    torch.set_num_threads(1)
    random.seed(4)
    torch.manual_seed(4)
    online, target = network(), network()
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-4)
    drone, replay = Drone(), Replay(30_000)
    for _ in range(30_000):
        replay.add(Transition(*drone.act(random.randrange(4))))
    began, warm, step = time.perf_counter(), None, 0
    while True:
        for _ in range(4):
            greedy = random.random() > 0.1
            with torch.no_grad():
                rotor = int(online(drone.state).argmax()) if greedy else random.randrange(4)
            replay.add(Transition(*drone.act(rotor)))
        learn(online, target, optimizer, replay.sample(256))
        step += 1
        if step % 200 == 0:
            target.load_state_dict(online.state_dict())
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
