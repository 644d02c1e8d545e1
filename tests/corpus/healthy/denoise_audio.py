"""Train a mask-based speech denoiser on synthetic harmonic sounds with a multi-resolution loss.

A worker mixes clean tones with noise on the fly; the model masks the STFT, the loss
compares the waveforms and magnitudes at two resolutions.

"The augmentation calls scipy per sample, and there are lots of FFTs. Am I starving the model?"
"""

import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from scipy.signal import lfilter
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
SR, LEN, BATCH = 8000, 6000, 6
NFFT, HOP = 256, 64


class Mixtures(IterableDataset):
    def __iter__(self):
        rng = np.random.default_rng(torch.initial_seed() % 2**32)
        t = np.arange(LEN) / SR
        while True:
            f0 = rng.uniform(90, 300)
            clean = sum(np.sin(2 * np.pi * f0 * k * t) / k for k in range(1, 5))
            clean *= 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(2, 5) * t)
            noise = lfilter([1.0], [1.0, -rng.uniform(0.3, 0.9)], rng.standard_normal(LEN))
            mix = clean + rng.uniform(0.1, 0.5) * noise
            yield mix.astype(np.float32), clean.astype(np.float32)


class MaskNet(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        bins = NFFT // 2 + 1
        self.inp = nn.Linear(bins, hidden)
        self.convs = nn.ModuleList(nn.Conv1d(hidden, hidden, 5, padding=2) for _ in range(3))
        self.out = nn.Linear(hidden, bins)
        self.register_buffer("win", torch.hann_window(NFFT))

    def forward(self, wav):
        spec = torch.stft(wav, NFFT, HOP, window=self.win, return_complex=True)
        h = self.inp(torch.log1p(spec.abs()).transpose(1, 2)).transpose(1, 2)
        for c in self.convs:
            h = h + F.relu(c(h))
        mask = torch.sigmoid(self.out(h.transpose(1, 2))).transpose(1, 2)
        return torch.istft(spec * mask, NFFT, HOP, window=self.win, length=wav.shape[1])


class MultiResLoss(nn.Module):
    def __init__(self, sizes=(128, 512)):
        super().__init__()
        self.sizes = sizes
        for n in sizes:
            self.register_buffer(f"w{n}", torch.hann_window(n))

    def mag(self, x, n):
        return torch.stft(x, n, n // 4, window=getattr(self, f"w{n}"), return_complex=True).abs()

    def forward(self, est, ref):
        loss = F.l1_loss(est, ref)
        for n in self.sizes:
            with torch.no_grad():
                target = self.mag(ref, n)
            loss = loss + F.l1_loss(self.mag(est, n), target) / len(self.sizes)
        return loss


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(Mixtures(), batch_size=BATCH, num_workers=1, prefetch_factor=4)
    net, crit = MaskNet(), MultiResLoss()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    it = iter(loader)
    mix, clean = next(it)
    step, first = 0, None
    start = time.perf_counter()
    while True:
        t = time.perf_counter() - start
        if first is None and t >= 2:
            first = t, step
        if t >= SECONDS:
            break
        loss = crit(net(mix), clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        mix, clean = next(it)
    print(f"step_ms {(t - first[0]) / max(1, step - first[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
