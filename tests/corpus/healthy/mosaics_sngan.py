"""Makes mosaics of a class with a projection discriminator whose layers have a spectral norm.

The discriminator is updated twice for each update of the generator, with hinge losses.

"Spectral norms add a power iteration to each layer. I have not touched the recipe of the paper."
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

SECONDS = float(os.environ.get("SECONDS", "22"))
CLASSES, Z, BATCH = 10, 24, 16


class Generator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.labels = nn.Embedding(CLASSES, Z)
        self.first = nn.Linear(2 * Z, width * 16)
        self.body = nn.Sequential(
            nn.ReLU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z, label):
        x = self.first(torch.cat([z, self.labels(label)], 1))
        return self.body(x.view(len(x), -1, 4, 4))


class Discriminator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(
            spectral_norm(nn.Conv2d(3, width, 4, 2, 1)),
            nn.LeakyReLU(0.1),
            spectral_norm(nn.Conv2d(width, 2 * width, 4, 2, 1)),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
        )
        self.out = spectral_norm(nn.Linear(2 * width * 16, 1))
        self.labels = spectral_norm(nn.Embedding(CLASSES, 2 * width * 16))

    def forward(self, x, label):
        features = self.body(x)
        return self.out(features)[:, 0] + (self.labels(label) * features).sum(1)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    tiles = torch.rand(2000, 3, 16, 16) * 2 - 1
    kinds = torch.randint(CLASSES, (2000,))
    g, d = Generator(), Discriminator()
    opt_g = torch.optim.Adam(g.parameters(), 2e-4, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(d.parameters(), 4e-4, betas=(0.0, 0.9))
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(len(tiles), (BATCH,))
        real, label = tiles[rows], kinds[rows]
        fake = g(torch.randn(BATCH, Z), label).detach()
        loss_d = F.relu(1 - d(real, label)).mean() + F.relu(1 + d(fake, label)).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        step += 1
        if step % 2 == 0:
            label = torch.randint(CLASSES, (BATCH,))
            loss_g = -d(g(torch.randn(BATCH, Z), label), label).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
