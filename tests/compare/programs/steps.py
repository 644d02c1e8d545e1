"""Train a small network for so many seconds; every batch may take so many milliseconds longer to come."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset[torch.Tensor]):
    def __init__(self, late_ms: float) -> None:
        self._late_s = late_ms / 1000
        self._batch = torch.randn(64, 256)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._late_s)
        return self._batch + index % 7


parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=10.0)
parser.add_argument("--late-ms", type=float, default=2.0)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ends_s = time.monotonic() + args.seconds
for batch in DataLoader(Batches(args.late_ms), batch_size=None):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.monotonic() > ends_s:
        break
