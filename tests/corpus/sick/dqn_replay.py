"""Deep Q-learning on a vectorised pendulum-like toy, learning from a large replay memory.

Class project after the well-known DQN tutorial, with more environments and a longer memory.

"It gets slower and slower while the memory fills up, and stays that slow. A network of this size should not
take so long for a batch of 160, and the environments are vectorised."
"""

import os
import random
import time
from collections import deque, namedtuple

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

Transition = namedtuple("Transition", "state action reward next_state done")
ACTIONS = np.linspace(-2, 2, 5)


class Pendulums:
    def __init__(self, number, rng):
        self.rng = rng
        self.angle = rng.uniform(-np.pi, np.pi, number)
        self.speed = rng.uniform(-1, 1, number)

    def observe(self):
        return np.stack([np.cos(self.angle), np.sin(self.angle), self.speed], 1).astype(np.float32)

    def step(self, action):
        torque = ACTIONS[action]
        reward = -(self.angle**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed = np.clip(self.speed + 0.05 * (15 * np.sin(self.angle) + 3 * torque), -8, 8)
        self.angle = (self.angle + 0.05 * self.speed + np.pi) % (2 * np.pi) - np.pi
        done = self.rng.random(len(torque)) < 0.005
        return self.observe(), reward.astype(np.float32), done


class ReplayMemory:
    def __init__(self, capacity):
        self.capacity, self.place = capacity, 0
        self.memory = [] if CURED else deque(maxlen=capacity)

    def push(self, *what):
        if CURED and len(self.memory) == self.capacity:
            self.memory[self.place] = Transition(*what)
            self.place = (self.place + 1) % self.capacity
        else:
            self.memory.append(Transition(*what))

    def sample(self, size):
        return random.sample(self.memory, size)  # cause: hot-line

    def __len__(self):
        return len(self.memory)


def q_net():
    return nn.Sequential(nn.Linear(3, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, len(ACTIONS)))


def learn(policy, target, optimizer, memory, size=160, gamma=0.98):
    batch = Transition(*zip(*memory.sample(size), strict=True))
    state, next_state = (torch.from_numpy(np.stack(x)) for x in (batch.state, batch.next_state))
    action = torch.tensor(batch.action)[:, None]
    reward, done = torch.tensor(batch.reward), torch.tensor(batch.done, dtype=torch.float32)
    with torch.no_grad():
        future = target(next_state).max(1).values * (1 - done)
    loss = nn.functional.smooth_l1_loss(policy(state).gather(1, action)[:, 0], reward + gamma * future)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy.parameters(), 100)
    optimizer.step()


def collect(envs, policy, memory, rng, epsilon):
    before = envs.observe()
    with torch.no_grad():
        action = policy(torch.from_numpy(before)).argmax(1).numpy()
    action = np.where(rng.random(len(action)) < epsilon, rng.integers(len(ACTIONS), size=len(action)), action)
    after, reward, done = envs.step(action)
    for row in zip(before, action.tolist(), reward.tolist(), after, done.tolist(), strict=True):
        memory.push(*row)
    return reward.mean()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    rng = np.random.default_rng(0)
    envs = Pendulums(16, rng)
    policy, target = q_net(), q_net()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, amsgrad=True)
    memory = ReplayMemory(300_000)
    while len(memory) < 300_000:
        collect(envs, policy, memory, rng, epsilon=1.0)

    begin, warm, step, returns = time.perf_counter(), None, 0, 0.0
    while (passed := time.perf_counter() - begin) < SECONDS:
        if warm is None and passed > 2:
            warm = passed, step
        returns += collect(envs, policy, memory, rng, epsilon=max(0.05, 0.9 - step / 3000))
        learn(policy, target, optimizer, memory)
        step += 1
        if step % 500 == 0:
            target.load_state_dict(policy.state_dict())
            print(f"step {step}, mean reward {returns / 500:.3f}")
            returns = 0.0
    print(f"step_ms {1000 * (passed - warm[0]) / (step - warm[1]):.3f}", flush=True)


if __name__ == "__main__":
    main()
