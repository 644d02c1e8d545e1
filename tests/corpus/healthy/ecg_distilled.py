"""Distils a wide ECG classifier into a small one, EMA of the student kept.

"The teacher is five times the student and takes more time than the student's own
forward and backward. I augment each recording afresh, so its answers can't be
stored beforehand."
"""

import copy
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
LEADS, LENGTH, RHYTHMS = 4, 500, 9


def convnet(c):
    return nn.Sequential(
        nn.Conv1d(LEADS, c, 9, stride=4, padding=4),
        nn.BatchNorm1d(c),
        nn.ReLU(inplace=True),
        nn.Conv1d(c, 2 * c, 7, stride=2, padding=3),
        nn.BatchNorm1d(2 * c),
        nn.ReLU(inplace=True),
        nn.Conv1d(2 * c, 2 * c, 7, stride=2, padding=3),
        nn.BatchNorm1d(2 * c),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(2 * c, RHYTHMS),
    )


def recordings(n=2000):
    g = torch.Generator().manual_seed(8)
    y = torch.randint(0, RHYTHMS, (n,), generator=g)
    t = torch.arange(LENGTH) / LENGTH
    phase = torch.rand(n, LEADS, 1, generator=g) * 6.28
    x = torch.sin(6.28 * (4 + 2 * y[:, None, None]) * t + phase)
    return x + 0.8 * torch.randn(n, LEADS, LENGTH, generator=g), y


def augment(x):
    x = x.roll(int(torch.randint(0, LENGTH, ())), dims=-1)
    return x * (0.8 + 0.4 * torch.rand(len(x), 1, 1)) + 0.1 * torch.randn_like(x)


def main():
    torch.manual_seed(0)
    x, y = recordings()
    teacher, student = convnet(64).eval().requires_grad_(False), convnet(32)
    ema = copy.deepcopy(student).requires_grad_(False)
    ema_p, stu_p = list(ema.parameters()), list(student.parameters())
    opt = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5000)
    began, n, since = time.perf_counter(), 0, None
    while time.perf_counter() - began < SECONDS:
        for rows in torch.randperm(len(x)).split(32):
            if len(rows) < 32:
                continue
            xb, yb = augment(x[rows]), y[rows]
            with torch.no_grad():
                soft = F.softmax(teacher(xb) / 2, dim=1)
            out = student(xb)
            loss = F.cross_entropy(out, yb) + F.kl_div(F.log_softmax(out / 2, 1), soft, reduction="batchmean")
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                torch._foreach_lerp_(ema_p, stu_p, 0.01)
            n += 1
            if since is None and time.perf_counter() - began > 2:
                since = time.perf_counter(), n
        for b_ema, b in zip(ema.buffers(), student.buffers(), strict=False):
            b_ema.copy_(b)
        print(f"{n} loss {loss.item():.3f}")
    print(f"step_ms {(time.perf_counter() - since[0]) / (n - since[1]) * 1000:.3f}")


if __name__ == "__main__":
    main()
