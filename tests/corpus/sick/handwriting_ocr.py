"""Trains a recogniser of handwriting with CTC, and reports the character error rate.

"Training slows down to half as soon as I turn the error rate on."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def edit_distance(said, meant):
    row = list(range(len(meant) + 1))
    for i, a in enumerate(said, start=1):
        last, row[0] = row[0], i
        for j, b in enumerate(meant, start=1):  # cause: hot-line
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))  # cause: hot-line
    return row[-1]


def error_rate(logits, targets):
    best = logits.argmax(2).t().tolist()
    distance = sum(
        edit_distance([c for c in line if c], meant) for line, meant in zip(best, targets.tolist(), strict=True)
    )
    return distance / targets.numel()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.strokes = nn.Sequential(
            *(nn.Conv1d(32, 64, 5, padding=2), nn.GELU(), nn.Conv1d(64, 64, 3, padding=1), nn.GELU())
        )
        self.out = nn.Linear(64, 40)

    def forward(self, strip):
        return self.out(self.strokes(strip.permute(1, 2, 0)).permute(2, 0, 1))


torch.set_num_threads(1)
reader = Reader()
glyphs = torch.randn(40, 32)
ctc = nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.Adam(reader.parameters(), lr=3e-3)
began, warm, step, rate = time.perf_counter(), None, 0, 1.0
while True:
    targets = torch.randint(1, 40, (16, 30))
    strip = glyphs[targets].repeat_interleave(2, 1).transpose(0, 1) + 0.1 * torch.randn(60, 16, 32)
    logits = reader(strip)
    loss = ctc(logits.log_softmax(2), targets, torch.full((16,), 60), torch.full((16,), 30))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(reader.parameters(), 5.0)
    optimizer.step()
    step += 1
    if not CURED or step % 100 == 0:
        rate = error_rate(logits, targets)  # cause: hot-line
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f} last rate {rate:.2f}", flush=True)
