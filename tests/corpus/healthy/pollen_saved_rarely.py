"""Trains a CNN on pollen grains; validates and saves every 150 steps, and logs every fiftieth.

"Nothing to complain of. I want to see whether the tool finds something anyway."
"""

import logging
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
logging.basicConfig(filename="pollen.log", level=logging.INFO)
log = logging.getLogger(__name__)

torch.set_num_threads(1)
grains, kinds = torch.rand(3000, 1, 32, 32), torch.randint(12, (3000,))
net = nn.Sequential(
    nn.Conv2d(1, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48 * 64, 12),
)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(2700, (32,))
    loss = nn.functional.cross_entropy(net(grains[rows]), kinds[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 50 == 0:
        log.info("step %d loss %.3f", step, loss.item())
    if step % 150 == 0:
        net.eval()
        with torch.no_grad():
            right = (net(grains[2700:]).argmax(1) == kinds[2700:]).float().mean()
        net.train()
        log.info("accuracy %.3f", right)
        torch.save(net.state_dict(), "pollen.pt")
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
