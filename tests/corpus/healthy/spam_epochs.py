"""Trains a filter of spam, and evaluates after each of its short epochs on a tenth of the mails.

"Fifty evaluations, is that too many?"
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

SECONDS = float(os.environ.get("SECONDS", "22"))


def evaluate(net, loader):
    net.eval()
    with torch.inference_mode():
        right = sum((net(x).squeeze(1) > 0).eq(y > 0.5).sum().item() for x, y in loader)
    net.train()
    return right


torch.set_num_threads(1)
mails = (torch.rand(3200, 1000) < 0.03).float()
train, held = random_split(TensorDataset(mails, (mails[:, :30].sum(1) > 1).float()), [2880, 320])
net = nn.Sequential(nn.Linear(1000, 768), nn.ReLU(), nn.Dropout(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(net.parameters())
began, warm, step, right = time.perf_counter(), None, 0, 0
while (now := time.perf_counter()) - began < SECONDS:
    for x, y in DataLoader(train, batch_size=144, shuffle=True):
        loss = nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    right = evaluate(net, DataLoader(held, batch_size=160))
    if warm is None and time.perf_counter() - began > 2:
        warm = step, time.perf_counter()
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f} right {right}", flush=True)
