"""Trains a convolution-free VAE on random blob images using Accelerate, keeping the best state on disk.

The job may be preempted, so the best state (by smoothed loss) is always available to resume.

"The first minutes of every run are terribly slow and jumpy, later the step time becomes normal. I thought
of warm-up of the allocator or of the CPU clock, but it goes on far too long for that."
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
CHECK_EVERY = 200 if CURED else 1
torch.set_num_threads(1)


def blobs(n=8000, size=28):
    rng = np.random.default_rng(0)
    yy, xx = np.mgrid[:size, :size]
    c = rng.uniform(6, size - 6, (n, 2, 1, 1))
    r = rng.uniform(2, 5, (n, 1, 1))
    d2 = (yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2
    return torch.tensor(np.exp(-d2 / (2 * r**2)), dtype=torch.float32).flatten(1)


class VAE(nn.Module):
    def __init__(self, d=784, h=512, z=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, d))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rec = F.binary_cross_entropy_with_logits(self.dec(z), x, reduction="sum") / len(x)
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum() / len(x)
        return rec + kl


class BestKeeper:
    def __init__(self, accelerator, folder, beta=0.99):
        self.acc, self.folder, self.beta = accelerator, Path(folder), beta
        self.smooth, self.best, self.saved = None, float("inf"), 0

    def __call__(self, loss, step):
        self.smooth = loss if self.smooth is None else self.beta * self.smooth + (1 - self.beta) * loss
        if step % CHECK_EVERY == 0 and self.smooth < self.best:
            self.best = self.smooth
            self.saved += 1
            self.acc.save_state(str(self.folder / "best"))  # cause: checkpoint-stall


def train(tmp):
    set_seed(1)
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=tmp))
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=5e-5)
    loader = DataLoader(TensorDataset(blobs()), batch_size=256, shuffle=True, drop_last=True)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    keep = BestKeeper(accelerator, tmp)

    step, mark, t0 = 0, None, time.perf_counter()
    while True:
        for (x,) in loader:
            loss = model(x)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 50.0)
            opt.step()
            opt.zero_grad()
            step += 1
            keep(loss.item(), step)

            now = time.perf_counter()
            if mark is None and now - t0 >= 2:
                mark = (now, step)
            if now - t0 >= SECONDS:
                return 1000 * (now - mark[0]) / (step - mark[1]), keep


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        ms, keep = train(tmp)
    print(f"best smoothed loss {keep.best:.2f}")
    print(f"step_ms {ms:.3f}", flush=True)
