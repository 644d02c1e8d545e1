"""Trains a forecast of tides online, on readings that a network of gauges sends 25 times a second.

"It is meant to be idle between two rounds of readings. They do not come faster if more processes ask for them."
"""

import multiprocessing
import os
import socket
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
GAUGES, HISTORY, PERIOD = 32, 96, 0.04
RECORD = 4 * (HISTORY + 1)


def send(connection):
    """The network: every gauge sends its last readings, and the next one, in each round."""
    draw, due = np.random.default_rng(0), time.monotonic()
    while True:
        start = draw.uniform(0, 6, (GAUGES, 1))
        levels = np.sin(start + np.arange(HISTORY + 1) / 9) + 0.1 * draw.standard_normal((GAUGES, HISTORY + 1))
        connection.sendall(levels.astype(np.float32).tobytes())
        due += PERIOD
        time.sleep(max(0.0, due - time.monotonic()))


class Readings(IterableDataset):
    def __init__(self, connection):
        self.connection = connection

    def __iter__(self):
        with self.connection.makefile("rb") as stream:
            while record := stream.read(RECORD):
                levels = np.frombuffer(record, np.float32)
                yield levels[:-1].copy(), levels[-1:].copy()


def main():
    torch.set_num_threads(1)
    ours, theirs = socket.socketpair()
    multiprocessing.Process(target=send, args=(theirs,), daemon=True).start()
    loader = DataLoader(Readings(ours), batch_size=GAUGES)
    net = nn.Sequential(nn.Linear(HISTORY, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    began, warm = time.perf_counter(), None
    for step, (levels, following) in enumerate(loader, start=1):
        loss = nn.functional.mse_loss(net(levels), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
