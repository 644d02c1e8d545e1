"""Learns the next move of a market from ticks that are drawn by weight, the rare large moves more often than others.

"With the sample of ten thousand ticks it was quick. With all ticks the batch is of the same size, the network is the
same, everything is in memory, and yet each step is slower."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
TICKS, WINDOW, BATCH = 700_000, 48, 256


class Ticks:
    """All ticks in one row, and the weight of each as the end of a window."""

    def __init__(self, seed=17):
        self.rng = np.random.default_rng(seed)
        noise = self.rng.standard_normal(TICKS, dtype=np.float32)
        self.moves = noise + 0.4 * np.roll(noise, 3) - 0.2 * np.roll(noise, 7)
        weight = 0.1 + np.abs(self.moves[WINDOW:]).astype(np.float64) ** 2
        self.weight = weight / weight.sum()
        self.steps = np.cumsum(self.weight)
        self.steps /= self.steps[-1]

    def draw(self):
        if CURED:
            return np.searchsorted(self.steps, self.rng.random(BATCH), side="right")
        return self.rng.choice(len(self.weight), BATCH, p=self.weight)  # cause: hot-line

    def batch(self):
        ends = self.draw()
        windows = self.moves[ends[:, None] + np.arange(WINDOW)]
        return torch.from_numpy(windows), torch.from_numpy(self.moves[ends + WINDOW])


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WINDOW, 320), nn.SiLU(), nn.Linear(320, 320), nn.SiLU(), nn.Linear(320, 320), nn.SiLU()
    ).append(nn.Linear(320, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    ticks = Ticks()
    began, warm, step, total = time.perf_counter(), None, 0, 0.0
    while True:
        window, move = ticks.batch()
        loss = nn.functional.huber_loss(model(window).squeeze(1), move)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item()
        step += 1
        if step % 200 == 0:
            print(f"{step}: {total / 200:.4f}", flush=True)
            total = 0.0
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
