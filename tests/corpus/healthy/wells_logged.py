"""Forecasts the water table of wells with a dilated convolution network and keeps a record of every single step.

"Loss read and written in each step, file flushed, gradients measured, a checkpoint each two hundred steps. A colleague
says that this must cost half of my time."
"""

import csv
import os
import tempfile
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
WELLS, DAYS, AHEAD, BATCH = 12, 128, 4, 32


class Record:
    def __init__(self, folder):
        self.file = open(os.path.join(folder, "steps.csv"), "w", newline="")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["step", "loss", "gradient", "rate"])

    def write(self, step, loss, gradient, rate):
        self.rows.writerow([step, f"{loss.item():.6f}", f"{gradient.item():.4f}", f"{rate:.2e}"])
        self.file.flush()


class WellNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        layers, channels = [], WELLS
        for dilation in (1, 2, 4, 8):
            layers += [nn.Conv1d(channels, width, 3, padding=dilation, dilation=dilation), nn.ReLU()]
            channels = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, WELLS * AHEAD)

    def forward(self, levels):
        return self.head(self.body(levels).mean(2)).view(-1, WELLS, AHEAD)


def levels(days=6_000, seed=0):
    g = torch.Generator().manual_seed(seed)
    season = torch.sin(torch.arange(days) / 58.1 + torch.rand(WELLS, 1, generator=g))
    return season + 0.02 * torch.randn(WELLS, days, generator=g).cumsum(1)


def save(path, model, optimizer, step):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    history = levels()
    windows = history.unfold(1, DAYS + AHEAD, 1).transpose(0, 1)
    model = WellNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20_000)
    with tempfile.TemporaryDirectory() as folder:
        record = Record(folder)
        began, warm, step = time.perf_counter(), None, 0
        while True:
            chosen = windows[torch.randint(len(windows), (BATCH,))]
            loss = nn.functional.mse_loss(model(chosen[:, :, :DAYS]), chosen[:, :, DAYS:])
            optimizer.zero_grad()
            loss.backward()
            gradient = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            record.write(step, loss, gradient, schedule.get_last_lr()[0])
            if step % 200 == 0:
                save(os.path.join(folder, "last.pt"), model, optimizer, step)
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
        record.file.close()
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
