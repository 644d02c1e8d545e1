"""Trains a sound-event CNN on spectrograms made on the fly, with Accelerate on two processes.

The clips come from an IterableDataset (simulator); both processes are to work on their own part.

"Adding the second process made each step slower, so that we gain hardly anything. Rank 1 has its core
idle half of the time and seems to wait in a broadcast that I never wrote."
"""

# ranks: 2
import os
import time

import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast
from scipy import signal
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)

SR = 8000


class Clips(IterableDataset):
    """endless stream of (log spectrogram, class)"""

    def __init__(self, seed=0, start=0, stride=1):
        self.seed, self.start, self.stride = seed, start, stride

    def clip(self, number):
        rng = np.random.default_rng((self.seed, number))
        label = int(rng.integers(6))
        t = np.arange(SR) / SR
        f0 = 150 * (label + 1) * rng.uniform(0.95, 1.05)
        wave = signal.chirp(t, f0, 1, f0 * 1.5) + 0.5 * rng.standard_normal(SR)
        b, a = signal.butter(4, [100, 3000], "bandpass", fs=SR)
        wave = signal.lfilter(b, a, wave)
        _, _, s = signal.stft(wave, SR, nperseg=256, noverlap=128)
        return torch.from_numpy(np.log1p(np.abs(s) * 100).astype(np.float32))[None], label

    def __iter__(self):
        number = self.start
        while True:
            yield self.clip(number)
            number += self.stride


class EventNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 3 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(3 * width, 6)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=False))
    torch.manual_seed(42)
    model = EventNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if CURED:
        mine = Clips(start=accelerator.process_index, stride=accelerator.num_processes)
        loader = DataLoader(mine, batch_size=8)
    else:
        loader = DataLoader(Clips(), batch_size=8)  # cause: dataloader-one-rank
        loader = accelerator.prepare(loader)
    model, optimizer = accelerator.prepare(model, optimizer)

    t0 = time.perf_counter()
    mark = None
    for step, (x, y) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = (now, step)
        if step % 20 == 0:
            over = broadcast(torch.tensor([int(now - t0 > SECONDS)]))
            if over.item():
                break
    if accelerator.is_main_process:
        print(f"step_ms {1e3 * (now - mark[0]) / (step - mark[1]):.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
