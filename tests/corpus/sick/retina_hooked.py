"""Trains a classifier of retina scans; hooks watch the activations, since some filters had died.

"I took the hooks from a blog post. They only look."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Watch:
    """Keeps the quantiles of what each activation gives."""

    def __init__(self, model):
        self.quantiles, self.calls = {}, 0
        for name, module in model.named_modules():
            if isinstance(module, nn.SiLU):
                module.register_forward_hook(self.hook(name))

    def hook(self, name):
        def look(module, inputs, output):
            self.calls += 1
            if CURED and self.calls % 300 >= 3:
                return
            self.quantiles[name] = np.percentile(output.detach().numpy(), (1, 25, 50, 75, 99))  # cause: hot-line

        return look


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.SiLU())


torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    block(1, 16), block(16, 48), block(48, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 5)
)
watch = Watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
scans, grades = torch.rand(256, 1, 64, 64), torch.randint(5, (256,))
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(256, (32,))
    loss = nn.functional.cross_entropy(model(scans[rows]), grades[rows], label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
