"""Forecasts the demand of shops with residual blocks of fully connected layers, validating and saving now and then.

Every 400 steps the held-out windows are evaluated and, if they got better, the weights are written to disk.

"Every few seconds training stands still for a moment. Do I lose much by that?"
"""

import os
import pathlib
import tempfile
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
PAST, AHEAD, BATCH = 96, 14, 128


def demand(shops=120, days=900):
    rng = np.random.default_rng(6)
    t = np.arange(days)
    level = rng.gamma(4, 10, (shops, 1))
    week = 1 + 0.4 * np.sin(2 * np.pi * (t / 7 + rng.random((shops, 1))))
    year = 1 + 0.3 * np.sin(2 * np.pi * (t / 365 + rng.random((shops, 1))))
    sold = rng.poisson(level * week * year) / level
    return torch.from_numpy(sold.astype(np.float32))


class Block(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(PAST, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.back, self.fore = nn.Linear(width, PAST), nn.Linear(width, AHEAD)

    def forward(self, x):
        h = self.trunk(x)
        return x - self.back(h), self.fore(h)


class NBeats(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x, fore = block(x)
            total = total + fore
        return total


def windows(series, rows, starts):
    cols = starts[:, None] + torch.arange(PAST + AHEAD)
    w = series[rows[:, None], cols]
    return w[:, :PAST], w[:, PAST:]


@torch.inference_mode()
def validate(model, x, y):
    model.eval()
    total = sum(
        nn.functional.l1_loss(model(a), b, reduction="sum") for a, b in zip(x.split(256), y.split(256), strict=False)
    )
    model.train()
    return total.item() / y.numel()


def main(folder):
    torch.set_num_threads(1)
    torch.manual_seed(6)
    series = demand()
    train_days = series.shape[1] - 100
    rows = torch.arange(len(series)).repeat(4)
    held_x, held_y = windows(series, rows, train_days - PAST + 20 * torch.arange(4).repeat_interleave(len(series)))
    model = NBeats()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    best, step, mark, t0 = float("inf"), 0, None, time.perf_counter()
    while True:
        x, y = windows(series, torch.randint(len(series), (BATCH,)), torch.randint(train_days - PAST - AHEAD, (BATCH,)))
        loss = nn.functional.l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 400 == 0:
            score = validate(model, held_x, held_y)
            print(f"{step}: train {loss.item():.4f} held-out {score:.4f}")
            if score < best:
                best = score
                torch.save(model.state_dict(), folder / "best.pt")
        now = time.perf_counter() - t0
        if mark is None and now > 2:
            mark = step, now
        if now > SECONDS:
            break
    print(f"step_ms {(now - mark[1]) / (step - mark[0]) * 1000:.3f}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        main(pathlib.Path(d))
