"""Trains a click model on a stream of events that are read from a message broker in pages.

"The broker is far away, but it could serve many readers. The training process mostly sits in recv."
"""

import itertools
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Events(IterableDataset):
    """Each reader takes every n-th page, so that none is read twice."""

    def __iter__(self):
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for page in itertools.count(start, step):
            time.sleep(0.03)  # a round trip
            generator = torch.Generator().manual_seed(page)
            rows = torch.randn(256, 40, generator=generator)
            yield from zip(rows, (rows.sum(1) > 0).float(), strict=True)


torch.set_num_threads(1)
loader = DataLoader(Events(), batch_size=512, num_workers=4 if CURED else 0)  # cause: dataloader-too-few-workers
model = nn.Sequential(nn.Linear(40, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)

began, warm = time.perf_counter(), None
for step, (rows, clicked) in enumerate(loader, start=1):
    loss = nn.functional.binary_cross_entropy_with_logits(model(rows).squeeze(1), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
