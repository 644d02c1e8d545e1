"""Trains a small attention model on sums of digits and prints what it attends to, to understand it.

"I can read along, which is nice, but it needs an hour now."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
torch.set_printoptions(precision=2, threshold=5000, linewidth=200)


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.out = nn.Linear(64, 1)

    def forward(self, digits):
        x = self.embed(digits)
        mixed, weights = self.attention(x, x, x, average_attn_weights=True)
        return self.out(mixed.mean(1))[:, 0], weights


adder = Adder()
optimizer = torch.optim.Adam(adder.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    digits = torch.randint(10, (64, 24))
    total, weights = adder(digits)
    loss = nn.functional.smooth_l1_loss(total, digits.sum(1).float() / 24)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not CURED or step % 200 == 0:
        print("step", step, "loss", loss.item(), "attends", weights[0])  # cause: hot-line or logging-stall
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
