"""Learns to jump from stones to stones with a deep Q-network; the replay memory is allocated at once, and fills.

"It has room for 200,000 frames. top shows more every minute, until it is full."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
FRAMES, SIDE = 200_000, 84


class Replay:
    def __init__(self):
        self.frames = np.zeros((FRAMES, SIDE, SIDE), dtype=np.uint8)
        self.actions = np.zeros(FRAMES, dtype=np.int64)
        self.rewards = np.zeros(FRAMES, dtype=np.float32)
        self.at = 0

    def add(self, frames, actions, rewards):
        index = np.arange(self.at, self.at + len(frames)) % FRAMES
        self.frames[index], self.actions[index], self.rewards[index] = frames, actions, rewards
        self.at += len(frames)

    def sample(self, rng, count=32):
        index = rng.integers(0, min(self.at, FRAMES) - 1, count)
        now, after = (
            torch.from_numpy(self.frames[i]).unsqueeze(1).float() / 255 for i in (index, (index + 1) % FRAMES)
        )
        return now, torch.from_numpy(self.actions[index]), torch.from_numpy(self.rewards[index]), after


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 81, 256), nn.ReLU(), nn.Linear(256, 4),
    )  # fmt: skip


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4)
    replay = Replay()
    ponds = rng.integers(0, 256, (32, SIDE, SIDE), dtype=np.uint8)
    replay.add(ponds, rng.integers(0, 4, 32), rng.random(32, dtype=np.float32))
    step, began, warm = 0, time.perf_counter(), None
    while True:
        with torch.no_grad():
            seen = torch.from_numpy(ponds).unsqueeze(1).float() / 255
            actions = online(seen).argmax(1).numpy()
        replay.add(ponds, actions, (actions == 2).astype(np.float32))
        ponds = np.roll(ponds, 1, axis=2)
        now_frames, taken, rewards, after = replay.sample(rng)
        with torch.no_grad():
            aim = rewards + 0.99 * target(after).max(1).values
        value = online(now_frames).gather(1, taken[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 500 == 0:
            target.load_state_dict(online.state_dict())
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
