"""Trains a CNN on seismic traces that all workers read through one handle, which must not be used by two at once.

"With eight workers it is as slow as with one."
"""

import multiprocessing
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Traces(Dataset):
    def __init__(self):
        self.lock = multiprocessing.Lock()

    def __len__(self):
        return 1_000_000

    def read(self, index):
        time.sleep(0.004)  # the file system's answer
        return torch.rand(256) + index % 7

    def __getitem__(self, index):
        if CURED:
            return self.read(index), index % 4
        with self.lock:  # cause: dataloader-lock
            return self.read(index), index % 4


torch.set_num_threads(1)
loader = DataLoader(Traces(), batch_size=16, num_workers=4, persistent_workers=True)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
began, warm, step = time.perf_counter(), None, 0
for x, y in loader:
    loss = nn.functional.cross_entropy(net(x), y)
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
