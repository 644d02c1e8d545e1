"""Estimates the draught of ships from the echoes of a harbour's sonar with Accelerate, from an archive per year.

"I had expected a loader of files to be limited by the disk, but the disk is idle, the files are a few hundred kilobytes
and surely in the cache of the system. Does Accelerate do something to my loader?"
"""

import os
import tempfile
import time

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
YEARS, SHIPS, SAMPLES = 10, 80, 256


def write_archives(folder):
    rng = np.random.default_rng(6)
    time_axis = np.arange(SAMPLES, dtype=np.float32)
    for year in range(YEARS):
        draught = rng.uniform(2, 18, SHIPS).astype(np.float32)
        echo = np.exp(-(((time_axis - 12 * draught[:, None]) / 9) ** 2)) + rng.normal(0, 0.2, (SHIPS, SAMPLES))
        np.savez_compressed(os.path.join(folder, f"{year}.npz"), echo=echo.round(2).astype(np.float32), draught=draught)


class Echoes(Dataset):
    """One ship's echo and draught."""

    def __init__(self, folder):
        self.paths = [os.path.join(folder, f"{year}.npz") for year in range(YEARS)]
        self.opened = {}

    def __len__(self):
        return YEARS * SHIPS

    def archive(self, path):
        if CURED:
            if path not in self.opened:
                with np.load(path) as archive:
                    self.opened[path] = archive["echo"], archive["draught"]
            return self.opened[path]
        with np.load(path) as archive:
            return archive["echo"], archive["draught"]  # cause: dataloader-too-few-workers or dataloader-slow-transform

    def __getitem__(self, i):
        year, ship = divmod(i, SHIPS)
        echo, draught = self.archive(self.paths[year])
        return torch.from_numpy(echo[ship]), torch.tensor(draught[ship] / 10)


def network():
    return nn.Sequential(
        nn.Unflatten(1, (1, SAMPLES)),
        nn.Conv1d(1, 32, 9, padding=4),
        nn.ReLU(),
        nn.Conv1d(32, 64, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.Conv1d(64, 64, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * SAMPLES // 4, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
        nn.Flatten(0),
    )


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        write_archives(folder)
        model = network()
        loader = DataLoader(Echoes(folder), batch_size=16, shuffle=True, drop_last=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        step, mark, began, now = 0, None, time.perf_counter(), 0.0
        while now - began < SECONDS:
            for echo, draught in loader:
                loss = nn.functional.smooth_l1_loss(model(echo), draught)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                step += 1
                now = time.perf_counter()
                if mark is None and now - began > 2:
                    mark = step, now
                if now - began > SECONDS:
                    break
        accelerator.print(f"loss {loss.item():.4f}")
        accelerator.print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
