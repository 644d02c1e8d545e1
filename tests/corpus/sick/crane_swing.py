"""Teaches a harbour crane to set loads down without a swing, Q-learning with a replay memory.

Sixteen simulated cranes move at the same time, after each move one batch of old moves is learned from.
The memory is filled by chance moves before the training.

"GPU or CPU makes no difference, and a larger memory makes each step slower although the batch stays the same."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
CRANES, SEEN, MOVES, MEMORY, BATCH, GAMMA = 16, 40, 5, 100_000, 192, 0.97


class Cranes:
    """A rough simulation: angle and speed of the load, and the last readings of both."""

    def __init__(self):
        self.state = torch.randn(CRANES, 2)
        self.seen = torch.zeros(CRANES, SEEN)

    def move(self, action):
        push = (action - MOVES // 2).float() * 0.4
        angle, speed = self.state.unbind(1)
        speed = 0.98 * speed - 0.3 * torch.sin(angle) + 0.1 * push + 0.02 * torch.randn(CRANES)
        self.state = torch.stack([angle + 0.2 * speed, speed], 1)
        self.seen = torch.cat([self.seen[:, 2:], self.state], 1)
        return self.seen, -self.state.square().sum(1) - 0.01 * push**2


class Replay:
    def __init__(self):
        self.before, self.after = torch.randn(MEMORY, SEEN), torch.randn(MEMORY, SEEN)
        self.action = torch.randint(MOVES, (MEMORY,))
        self.reward = -torch.rand(MEMORY)
        self.next = 0

    def add(self, before, action, reward, after):
        if CURED:
            slots = (self.next + torch.arange(len(action))) % MEMORY
            self.before[slots], self.after[slots] = before, after
            self.action[slots], self.reward[slots] = action, reward
            self.next = (self.next + len(action)) % MEMORY
            return
        new = {"before": before, "action": action, "reward": reward, "after": after}
        for name, rows in new.items():
            setattr(self, name, torch.cat([getattr(self, name), rows])[-MEMORY:])  # cause: hot-line

    def sample(self):
        rows = torch.randint(MEMORY, (BATCH,))
        return self.before[rows], self.action[rows], self.reward[rows], self.after[rows]


def make_net(width=256):
    return nn.Sequential(
        nn.Linear(SEEN, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, MOVES),
    )  # fmt: skip


def main():
    torch.manual_seed(0)
    cranes, replay = Cranes(), Replay()
    net, target = make_net(), make_net()
    target.load_state_dict(net.state_dict())
    opt = torch.optim.Adam(net.parameters(), lr=3e-4, fused=True)
    step, mark, seen = 0, None, cranes.seen
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        with torch.no_grad():
            action = net(seen).argmax(1)
            chance = torch.rand(CRANES) < max(0.05, 1 - step / 2000)
            action = torch.where(chance, torch.randint(MOVES, (CRANES,)), action)
            following, reward = cranes.move(action)
            replay.add(seen, action, reward, following)
            seen = following
            before, act, gain, after = replay.sample()
            goal = gain + GAMMA * target(after).gather(1, net(after).argmax(1, keepdim=True))[:, 0]
        loss = nn.functional.smooth_l1_loss(net(before).gather(1, act[:, None])[:, 0], goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 500 == 0:
            target.load_state_dict(net.state_dict())
            print(f"step {step} loss {loss.item():.4f} reward {reward.mean().item():.3f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
