"""Trains a GRU on features of surveillance clips; most are short, one of twenty is an hour of traffic.

"Three workers are nearly always done, and yet the loop stutters."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Clips(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.7 if index % 160 == 77 else 0.002)  # the archive sends the clip
        return torch.full((20, 64), index % 11 / 11), index % 5


class Watcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 5)

    def forward(self, clip):
        return self.head(self.gru(clip)[0][:, -1])


torch.set_num_threads(1)
clips = DataLoader(Clips(), batch_size=8, num_workers=3, in_order=not CURED)  # cause: dataloader-head-of-line
watcher = Watcher()
optimizer = torch.optim.RMSprop(watcher.parameters())
began, warm, step = time.perf_counter(), None, 0
for clip, label in clips:
    optimizer.zero_grad()
    nn.functional.cross_entropy(watcher(clip), label).backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
