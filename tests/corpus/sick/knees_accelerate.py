"""Outlines cartilage in MRI slices of knees with Accelerate; the volumes are .gz files, as the scanner exports them.

"All four files together are a few megabytes, they are in the page cache after the first epoch. It is no faster then."
"""

import functools
import gzip
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOLUMES, SLICES, SIDE = 4, 24, 64


def export(folder):
    for number in range(VOLUMES):
        volume = nn.functional.avg_pool2d(torch.randn(SLICES, SIDE, SIDE), 5, 1, 2)
        volume = torch.stack([(400 * volume).round(), 100.0 * (volume > 0.1)]).to(torch.int16)
        with gzip.open(folder / f"knee{number:02d}.gz", "wb", compresslevel=6) as file:
            file.write(volume.numpy().tobytes())


def read_volume(path):
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), dtype=np.int16).reshape(2, SLICES, SIDE, SIDE)


class Slices(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.gz"))
        self.read = functools.cache(read_volume) if CURED else read_volume

    def __len__(self):
        return len(self.files) * SLICES

    def __getitem__(self, i):
        number, level = divmod(i, SLICES)
        volume = self.read(self.files[number])  # cause: dataloader-too-few-workers or dataloader-slow-transform
        picture, mask = torch.from_numpy(volume[:, level].astype(np.float32))
        return ((picture - picture.mean()) / picture.std())[None], mask[None] / 100


class Outline(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width), nn.ReLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, picture):
        return self.up(self.down(picture))


def dice(logits, mask):
    guess = logits.sigmoid()
    return 1 - (2 * (guess * mask).sum() + 1) / (guess.sum() + mask.sum() + 1)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as directory:
        export(Path(directory))
        model = Outline()
        model, optimizer, loader = accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            DataLoader(Slices(Path(directory)), batch_size=8, shuffle=True, drop_last=True),
        )
        began, warm, step, now = time.perf_counter(), None, 0, 0.0
        while now - began < SECONDS:
            for pictures, masks in loader:
                logits = model(pictures)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, masks) + dice(logits, masks)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                step += 1
                now = time.perf_counter()
                if warm is None and now - began > 2:
                    warm = step, now
                if now - began > SECONDS:
                    break
    accelerator.print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
