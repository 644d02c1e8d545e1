"""Trains an image classifier and keeps an average of its weights.

"The average costs more than the optimizer. Is that normal?"
"""

import copy
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def averaged(average, model, decay=0.999):
    if CURED:
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        return average
    fresh = copy.deepcopy(model)  # cause: hot-line
    old = average.state_dict()
    for name, value in fresh.state_dict().items():
        value.mul_(1 - decay).add_(old[name], alpha=decay)
    return fresh


torch.set_num_threads(1)
layers = [nn.Flatten(), nn.Linear(3 * 16 * 16, 512)]
for _ in range(24):
    layers += [nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU()]
model = nn.Sequential(*layers, nn.Linear(512, 102))
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
flowers, kinds = torch.rand(1000, 3, 16, 16), torch.randint(102, (1000,))
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(1000, (16,))
    loss = nn.functional.cross_entropy(model(flowers[rows]), kinds[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average = averaged(average, model)
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
