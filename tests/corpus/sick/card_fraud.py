"""Trains a detector of card fraud on tabular data and watches the AUC while it trains.

"It takes ten times as long as in the notebook, where I had no progress line."
"""

import collections
import os
import time

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def batches(size):
    chance = np.random.default_rng(2)
    while True:
        x = chance.standard_normal((size, 60), dtype=np.float32)
        y = (x[:, :5].sum(1) + chance.standard_normal(size) > 2).astype(np.float32)
        yield torch.from_numpy(x), torch.from_numpy(y)


torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(60, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(net.parameters())
scores, labels = collections.deque(maxlen=100), collections.deque(maxlen=100)
began, warm = time.perf_counter(), None
for step, (x, y) in enumerate(batches(512), start=1):
    logits = net(x).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scores.append(logits.detach().numpy())
    labels.append(y.numpy())
    if not CURED or step % 100 == 0:
        auc = roc_auc_score(np.concatenate(labels), np.concatenate(scores))  # cause: hot-line
        if step % 500 == 0:
            print(f"step {step} auc {auc:.4f}")
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
