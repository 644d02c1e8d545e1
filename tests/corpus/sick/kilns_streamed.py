"""Learns the firing curves of kilns from a stream of logged runs, mixed by a shuffle buffer.

The log comes in the order of the kilns, so neighbouring runs are alike and have to be mixed before training.

"The reading itself is almost nothing: I can iterate over the log by itself at thousands of runs per second. In
training the process still seems to wait."
"""

import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
RUNS, LENGTH, BUFFER, BATCH = 4096, 96, 1024, 32


class KilnLog(IterableDataset):
    def __init__(self, seed=8):
        rng = np.random.default_rng(seed)
        peak = np.sort(rng.uniform(0.2, 1.0, RUNS))
        hours = np.linspace(0, 1, LENGTH)
        curve = peak[:, None] * np.sin(np.pi * hours) + rng.normal(size=(RUNS, LENGTH)).cumsum(1) * 0.02
        self.runs = curve.astype(np.float32)

    def read(self):
        """The runs in the order of the log, over and over."""
        while True:
            for run in self.runs:
                yield torch.from_numpy((run - run.mean()) / (run.std() + 1e-6))

    def __iter__(self):
        buffer = []
        for run in self.read():
            if len(buffer) < BUFFER:
                buffer.append(run)
                continue
            if CURED:
                at = random.randrange(BUFFER)
                out, buffer[at] = buffer[at], run
                yield out
            else:
                random.shuffle(buffer)  # cause: dataloader-slow-transform or dataloader-too-few-workers
                yield buffer.pop()
                buffer.append(run)


class Forecaster(nn.Module):
    """Temporal convolutions, each position predicts the next four."""

    def __init__(self, width=40, ahead=4):
        super().__init__()
        self.ahead = ahead
        self.enter = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**k) for k in range(4))
        self.leave = nn.Conv1d(width, ahead, 1)

    def forward(self, run):
        x = self.enter(run[:, None])
        for k, layer in enumerate(self.layers):
            x = x + torch.relu(layer(nn.functional.pad(x, (2 * 2**k, 0))))
        return self.leave(x)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    loader = DataLoader(KilnLog(), batch_size=BATCH, num_workers=0)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step, mark, t0 = 0, None, time.perf_counter()
    for runs in loader:
        ahead = runs.unfold(1, model.ahead, 1)[:, 1:].transpose(1, 2)
        told = model(runs)[:, :, : ahead.shape[2]]
        loss = nn.functional.mse_loss(told, ahead)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"{step}: mse {loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = step, now
        if now - t0 > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
