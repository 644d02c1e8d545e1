"""Trains a detector of swarming bees on sounds of hives; the recorders overlap, so windows that were seen are skipped.

"A hash is what git uses for whole repositories, it cannot be the slow part."
"""

import hashlib
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Seen:
    """Which windows were in a batch of this epoch."""

    def __init__(self):
        self.keys = set()

    def key_of(self, number, window):
        if CURED:
            return number
        return hashlib.sha256(window.numpy().tobytes()).hexdigest()  # cause: hot-line

    def fresh(self, numbers, windows):
        kept = []
        for place, (number, window) in enumerate(zip(numbers.tolist(), windows, strict=True)):
            key = self.key_of(number, window)
            if key not in self.keys:
                self.keys.add(key)
                kept.append(place)
        if len(self.keys) > 4000:
            self.keys.clear()
        return kept


class Ear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(48, 96, 9, stride=4),
            nn.BatchNorm1d(96),
            nn.ReLU(),
            nn.Conv1d(96, 96, 5, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(96, 2),
        )

    def forward(self, windows):
        return self.layers(windows)


def main():
    torch.set_num_threads(1)
    recordings = torch.randn(48, 60_000)
    ear, seen = Ear(), Seen()
    optimizer = torch.optim.Adam(ear.parameters(), 1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        starts = torch.randint(59_000, (24,))
        windows = torch.stack([recordings[:, start : start + 512] for start in starts.tolist()])
        kept = seen.fresh(starts, windows)
        loss = nn.functional.cross_entropy(ear(windows[kept]), starts[kept] // 30_000)
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
