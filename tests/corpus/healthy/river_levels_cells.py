"""Trains an LSTM cell on river levels; it has to go through the hours one by one, because each needs the one before.

"A loop of Python in forward: isn't that what one should never do?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))


class River(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(17, 96)
        self.out = nn.Linear(96, 1)

    def forward(self, rain):
        level = rain.new_zeros(len(rain), 1)
        state, levels = None, []
        for hour in range(rain.shape[1]):
            state = self.cell(torch.cat([rain[:, hour], level], 1), state)
            level = self.out(state[0])  # what it forecasts is what it sees next
            levels.append(level)
        return torch.stack(levels, 1)


torch.set_num_threads(1)
river = River()
optimizer = torch.optim.Adam(river.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    rain = torch.rand(64, 48, 16)
    loss = nn.functional.mse_loss(river(rain)[..., 0], rain.cumsum(1).mean(2) / 48)
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
