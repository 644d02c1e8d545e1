"""Trains a small U-shaped network on microscopy images, and saves often, because the node is preemptible.

"It is slower on the preemptible nodes, though they are the same hardware."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.middle = nn.Sequential(nn.Flatten(), nn.Linear(32 * 256, 64), nn.ReLU(), nn.Linear(64, 32 * 256))
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 1, 1)

    def forward(self, x):
        a = torch.relu(self.down1(x))
        b = torch.relu(self.down2(a))
        c = b + self.middle(b).view_as(b)
        return self.out(torch.cat([a, self.up(c)], 1))


torch.set_num_threads(1)
net = UNet()
optimizer = torch.optim.Adam(net.parameters())
cells = torch.rand(256, 1, 32, 32)
began, warm, step = time.perf_counter(), None, 0
while True:
    x = cells[torch.randint(256, (8,))]
    loss = nn.functional.binary_cross_entropy_with_logits(net(x), (x > 0.5).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % (200 if CURED else 4) == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, "cells.part")  # cause: checkpoint-stall
        os.replace("cells.part", "cells.pt")
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
