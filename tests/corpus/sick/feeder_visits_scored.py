# ranks: 2
"""Trains a classifier of visits to a bird feeder on two ranks; torchmetrics keeps three scores of all ranks.

"The scores must be those of all ranks, so I switched the synchronization on. Is gloo this slow?"
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BIRDS = 14


def scores():
    kinds = MulticlassAccuracy, MulticlassF1Score, MulticlassRecall
    made = [kind(BIRDS, dist_sync_on_step=not CURED, validate_args=False) for kind in kinds]
    return MetricCollection(made, compute_groups=False)


class Feeder:
    def __init__(self):
        body = nn.Sequential(
            nn.Conv1d(6, 48, 7, stride=2), nn.ReLU(), nn.Conv1d(48, 96, 5, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(384, BIRDS),
        )  # fmt: skip
        self.model = DistributedDataParallel(body)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.scores = scores()

    def step(self, visits, birds):
        logits = self.model(visits)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(logits, birds).backward()
        self.optimizer.step()
        return self.scores(logits.detach(), birds)  # cause: small-collectives


dist.init_process_group("gloo")
torch.set_num_threads(1)
feeder = Feeder()
began, warm, step = time.perf_counter(), None, 0
while True:
    scored = feeder.step(torch.randn(48, 6, 160), torch.randint(BIRDS, (48,)))
    step += 1
    if step % 100 == 0:
        feeder.scores.reset()
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 25 == 0:
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
if dist.get_rank() == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
