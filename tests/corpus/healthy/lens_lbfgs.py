"""Fits the surface of a lens with L-BFGS, which computes the loss several times in each step.

"Why is a step of this optimizer so long?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))

torch.set_num_threads(1)
points = torch.rand(1500, 3)
depth = (points * torch.tensor([3.0, 5.0, 7.0])).sin().prod(1)
net = nn.Sequential(nn.Linear(3, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=8, history_size=20)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(points)[:, 0], depth + 0.05 * torch.randn(1500))
    loss.backward()
    return loss


began, warm, step = time.perf_counter(), None, 0
while True:
    optimizer.step(closure)
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
