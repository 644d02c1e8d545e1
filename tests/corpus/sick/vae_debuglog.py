"""Train a convolutional VAE on procedurally drawn blobs.

Standard logging setup with the level taken from LOGLEVEL (default INFO), so the debug
messages sprinkled over the model are silent.

"Profiler of the IDE says most of my steps is inside torch, but I have only three conv
layers. Logging can't be it, I only print a line each 50 steps."
"""

import logging
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO"), format="%(asctime)s %(name)s %(levelname)s %(message)s")
log = logging.getLogger("vae")


def trace(name, t):
    """Debug print of a tensor inside the model."""
    if CURED:
        log.debug("%s %s = %s", name, tuple(t.shape), t)
    else:
        log.debug(f"{name} {tuple(t.shape)} = {t}")  # cause: hot-line or logging-stall


def blobs(n=4096, size=28):
    g = torch.Generator().manual_seed(0)
    ax = torch.linspace(-1, 1, size)
    c = torch.rand(n, 2, 1, 1, generator=g) * 1.2 - 0.6
    s = torch.rand(n, 1, 1, generator=g) * 0.2 + 0.1
    d = (ax[None, None, :] - c[:, 0]) ** 2 + (ax[None, :, None] - c[:, 1]) ** 2
    return torch.exp(-d / (2 * s**2)).unsqueeze(1)


class Encoder(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.c1 = nn.Conv2d(1, 16, 3, 2, 1)
        self.c2 = nn.Conv2d(16, 32, 3, 2, 1)
        self.mu = nn.Linear(32 * 49, z)
        self.lv = nn.Linear(32 * 49, z)

    def forward(self, x):
        h = F.silu(self.c1(x))
        trace("enc.h1", h)
        h = F.silu(self.c2(h)).flatten(1)
        mu, lv = self.mu(h), self.lv(h).clamp(-8, 8)
        trace("enc.mu", mu)
        trace("enc.logvar", lv)
        return mu, lv


class Decoder(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.fc = nn.Linear(z, 32 * 49)
        self.t1 = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.t2 = nn.ConvTranspose2d(16, 1, 4, 2, 1)

    def forward(self, z):
        h = F.silu(self.fc(z)).view(-1, 32, 7, 7)
        h = F.silu(self.t1(h))
        trace("dec.h2", h)
        return self.t2(h)


class VAE(nn.Module):
    def __init__(self, z=12):
        super().__init__()
        self.enc, self.dec = Encoder(z), Decoder(z)

    def forward(self, x):
        mu, lv = self.enc(x)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        rec = self.dec(z)
        trace("rec", rec)
        bce = F.binary_cross_entropy_with_logits(rec, x, reduction="none").sum((1, 2, 3)).mean()
        kl = -0.5 * (1 + lv - mu**2 - lv.exp()).sum(1).mean()
        return bce, kl


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(blobs()), batch_size=128, shuffle=True, drop_last=True)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, mark, t0, running = 0, None, time.perf_counter(), True
    while running:
        for (x,) in loader:
            dt = time.perf_counter() - t0
            if mark is None and dt >= 2:
                mark = (dt, step)
            if dt >= SECONDS:
                running = False
                break
            bce, kl = model(x)
            loss = bce + min(1.0, step / 500) * kl
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 50 == 0:
                log.info("step %d bce %.2f kl %.2f", step, bce.item(), kl.item())
    print(f"step_ms {(dt - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
