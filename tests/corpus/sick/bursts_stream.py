"""Looks for radio bursts in the recordings of a telescope, streamed by two worker processes.

"With no worker the network starves, with one it starves less, and with two it is just as with one. Both workers are
busy all the time. Is this the famous lock of Python?"
"""

import itertools
import os
import time
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
FRAMES, WINDOW, BANDS, BATCH = 126, 512, 64, 32


def observe(count=320, seed=4):
    """Recordings as the correlator packs them, with a mark for those that hold a burst."""
    rng = np.random.default_rng(seed)
    clock = np.arange(FRAMES * WINDOW // 2 + WINDOW // 2)
    packed = []
    for number in range(count):
        signal = 40 * rng.standard_normal(len(clock), dtype=np.float32)
        if number % 2:
            signal += 30 * np.sin(0.3 * clock)
        packed.append((zlib.compress(signal.astype(np.int16).tobytes(), 1), number % 2))
    return packed


class BurstStream(IterableDataset):
    def __init__(self, recordings):
        self.recordings = recordings
        self.window = np.hanning(WINDOW).astype(np.float32)

    def spectrogram(self, blob):
        signal = np.frombuffer(zlib.decompress(blob), dtype=np.int16).astype(np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(signal, WINDOW)[:: WINDOW // 2]
        power = np.abs(np.fft.rfft(frames * self.window, axis=1)[:, 1:]) ** 2
        bands = np.log1p(power.reshape(len(frames), BANDS, -1)).mean(2)
        return np.ascontiguousarray(bands.T, dtype=np.float32)

    def samples(self):
        for night in itertools.count():
            order = np.random.default_rng(night).permutation(len(self.recordings))
            for place, number in enumerate(order):
                yield place, self.recordings[number]

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for place, (blob, burst) in self.samples():
            mine = place % workers == worker
            if CURED and not mine:
                continue
            spectrum = self.spectrogram(blob)  # cause: dataloader-slow-transform
            if mine:
                yield torch.from_numpy(spectrum), burst


class Finder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(BANDS, 80, 5, padding=2), nn.ReLU(), nn.Conv1d(80, 96, 5, stride=2, padding=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(96, 2)

    def forward(self, spectra):
        return self.head(self.body(spectra))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(BurstStream(observe()), batch_size=BATCH, num_workers=2)
    model = Finder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm = time.perf_counter(), None
    for step, (spectra, bursts) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(spectra), bursts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
