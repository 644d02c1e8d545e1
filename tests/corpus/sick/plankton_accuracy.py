"""Trains a CNN on plankton and shows the training accuracy, in evaluation mode, as the paper does.

"The progress line shows the accuracy of each batch, and the epoch takes half as long again."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@torch.no_grad()
def accuracy(net, x, y):
    net.eval()
    right = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return right


torch.set_num_threads(1)
net = nn.Sequential(
    nn.Conv2d(1, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2),
    nn.Conv2d(32, 48, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48 * 25, 20),
)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
catch, species = torch.rand(2048, 1, 28, 28), torch.randint(20, (2048,))
began, warm, step, shown = time.perf_counter(), None, 0, 0.0
while True:
    rows = torch.randint(2048, (64,))
    x, y = catch[rows], species[rows]
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not CURED or step % 50 == 0:
        shown = 0.9 * shown + 0.1 * accuracy(net, x, y)  # cause: hot-line
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f} accuracy {shown:.2f}", flush=True)
