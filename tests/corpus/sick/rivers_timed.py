"""Trains a forecast of the levels of rivers; a decorator counts who calls the parts of a step, and for how long.

"It is our own little profiler. It says that all of the functions are fast."
"""

import functools
import inspect
import os
import sys
import time
from collections import Counter

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
CALLS, TIMES = Counter(), Counter()


def caller():
    if CURED:
        return sys._getframe(2).f_code.co_name
    return inspect.stack()[2].function  # cause: hot-line


def timed(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        CALLS[caller(), function.__name__] += 1
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            TIMES[function.__name__] += time.perf_counter() - began

    return wrapped


class Levels(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(10, 128, batch_first=True)
        self.out = nn.Linear(128, 7)

    def forward(self, past):
        return self.out(self.read(past)[0][:, -1])


@timed
def window_of(gauges, start):
    return gauges[start : start + 47]


@timed
def batch_of(gauges):
    starts = torch.randint(gauges.shape[0] - 60, (32,)).tolist()
    windows = torch.stack([window_of(gauges, start) for start in starts])
    return windows[:, :40], windows[:, 40:, 0]


@timed
def loss_of(told, future):
    worst = torch.quantile((told - future).abs(), 0.9)
    return (told - future).square().mean() + 0.1 * worst


@timed
def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main():
    torch.set_num_threads(1)
    gauges = torch.randn(20_000, 10).cumsum(0) / 50
    model = Levels()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        past, future = batch_of(gauges)
        loss = loss_of(model(past), future)
        update(optimizer, loss)
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
