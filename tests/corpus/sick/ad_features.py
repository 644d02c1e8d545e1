"""Trains a wide model of ad clicks; each of the 1000 features of a row comes as a tensor of its own.

"With two workers it is slower than with none, so is my DataLoader broken?"
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
NAMES = [f"feature_{number}" for number in range(1000)]


class Clicks(Dataset):
    def __init__(self):
        self.table = torch.rand(20_000, len(NAMES))

    def __len__(self):
        return 20_000 * 50

    def __getitems__(self, indices):
        """Of torch: the rows of a whole batch at once."""
        return self.table[torch.tensor(indices) % 20_000]


def by_name(rows):
    return dict(zip(NAMES, rows.t().contiguous().unbind(), strict=True))


torch.set_num_threads(1)
workers = 0 if CURED else 2
loader = DataLoader(  # cause: dataloader-too-many-workers
    Clicks(), batch_size=128, num_workers=workers, collate_fn=by_name
)
wide = nn.Sequential(nn.Linear(len(NAMES), 1024), nn.ReLU(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adagrad(wide.parameters())
began, warm, step = time.perf_counter(), None, 0
for features in loader:
    x = torch.stack([features[name] for name in NAMES], dim=1)
    loss = nn.functional.softplus(-wide(x)).mean()
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
