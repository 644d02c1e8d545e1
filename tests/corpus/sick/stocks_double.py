"""Trains an LSTM on stock prices that come from pandas as doubles.

"expected Float but found Double, so I called .double(), and it worked."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Trader(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(30 * 24, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
        self.out = nn.Linear(512, 24)

    def forward(self, days):
        return self.out(self.mix(days.flatten(1)))


torch.set_num_threads(1)
prices = np.random.default_rng(8).standard_normal((6000, 24)).cumsum(axis=0)
net = Trader()
if not CURED:
    net = net.double()  # cause: float64-parameters no-line
optimizer = torch.optim.Adam(net.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    first = np.random.randint(0, 5900, 256)
    days = torch.from_numpy(prices[first[:, None] + np.arange(31)])
    days = days.float() if CURED else days
    loss = nn.functional.mse_loss(net(days[:, :30]), days[:, 30])
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
