"""Trains a CNN on leaves; a library that draws them binds the process to one core when it is imported.

"top shows one core at 100 %, and all workers below it."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
CORES = os.sched_getaffinity(0)


class Leaves(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        leaf = rng.random((96, 96))
        for _ in range(12):
            leaf = np.sort(leaf, axis=index % 2)[::-1] * 0.9 + rng.random((96, 96)) * 0.1
        return torch.as_tensor(leaf[::3, ::3].copy(), dtype=torch.float32)[None], index % 5


def bound(_worker):
    """Undoes what the library did, or not."""
    os.sched_setaffinity(0, CORES if CURED else {min(CORES)})


torch.set_num_threads(1)
loader = DataLoader(  # cause: dataloader-pinned-workers
    Leaves(), batch_size=16, num_workers=2, persistent_workers=True, worker_init_fn=bound
)
net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 225, 5))
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
