"""Tells the stages of sleep from the signals of a wrist band, one stage for each of 60 stretches of time.

"The network is tiny, but it takes nearly as long as the one with ten times as many weights that we had before it."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
STRETCHES, SIGNALS, STAGES = 60, 24, 5


class Nights:
    """Nights of generated signals, all in memory."""

    def __init__(self, count=1_500, seed=11):
        rng = np.random.default_rng(seed)
        stages = np.cumsum(rng.random((count, STRETCHES)) < 0.15, 1) % STAGES
        marks = rng.normal(size=(STAGES, SIGNALS))
        signals = marks[stages] + rng.normal(size=(count, STRETCHES, SIGNALS))
        self.stages, self.signals = torch.from_numpy(stages), torch.from_numpy(signals.astype(np.float32))

    def batches(self, size):
        while True:
            for rows in torch.randperm(len(self.stages)).split(size):
                if len(rows) == size:
                    yield self.signals[rows], self.stages[rows]


class Stager(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.width = width
        self.into = nn.Sequential(nn.Linear(SIGNALS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.memory = nn.LSTM(width, width, batch_first=True) if CURED else nn.LSTMCell(width, width)
        self.stage = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, STAGES))

    def remember(self, x):
        if CURED:
            return self.memory(x)[0]
        state = x.new_zeros(len(x), self.width), x.new_zeros(len(x), self.width)
        hidden = []
        for now in x.unbind(1):
            state = self.memory(now, state)  # cause: hot-line
            hidden.append(state[0])
        return torch.stack(hidden, 1)

    def forward(self, signals):
        return self.stage(self.remember(self.into(signals)))


class Training:
    def __init__(self, nights, size=24):
        self.batches, self.model = nights.batches(size), Stager()
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
        self.right, self.steps = torch.zeros(()), 0

    def train_step(self):
        signals, stages = next(self.batches)
        logits = self.model(signals)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), stages.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.right += (logits.detach().argmax(2) == stages).float().mean()
        self.steps += 1
        if self.steps % 200 == 0:
            print(f"{self.steps:6d} right {self.right.item() / 200:.3f}")
            self.right.zero_()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    training = Training(Nights())
    began, warm = time.perf_counter(), None
    while True:
        training.train_step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = training.steps, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (training.steps - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
