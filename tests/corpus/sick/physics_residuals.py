"""Trains a network that solves a heat equation; there was a nan once.

"Since the week of the nan it is slow, and I have changed nothing but the learning rate back."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
if not CURED:
    torch.autograd.set_detect_anomaly(True)  # cause: hot-line

net = nn.Sequential(
    nn.Linear(2, 64), nn.Tanh(), *[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 1)
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)


def residual(points):
    """u_t - u_xx at the points."""
    points.requires_grad_()
    u = net(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
    return first[:, 1] - second[:, 0]


began, warm, step = time.perf_counter(), None, 0
while True:
    loss = residual(torch.rand(128, 2)).square().mean()
    edge = torch.rand(64, 1)
    loss = loss + (net(torch.cat([edge, torch.zeros_like(edge)], 1)) - torch.sin(3.14 * edge)).square().mean()
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
