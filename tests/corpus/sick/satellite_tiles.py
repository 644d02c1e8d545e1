"""Trains a small CNN to tell land use on satellite tiles, which a tile server delivers one by one.

"On the cluster an epoch takes three times as long as on my laptop, where the tiles are on the disk."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Tiles(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.006)  # the server's answer
        return torch.full((3, 32, 32), index % 7 / 7), index % 8


torch.set_num_threads(1)
workers = 4 if CURED else 1
loader = DataLoader(  # cause: dataloader-too-few-workers
    Tiles(), batch_size=16, num_workers=workers, persistent_workers=True
)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 16 * 16, 8),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

began, warm, step = time.perf_counter(), None, 0
for tiles, kinds in loader:
    loss = criterion(model(tiles), kinds)
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
