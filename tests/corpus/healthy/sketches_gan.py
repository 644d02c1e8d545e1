"""Trains a GAN on sketches: two networks, two optimizers, three backward passes over the networks in a step.

"Which of the two is the slow one?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))

torch.set_num_threads(1)
artist = nn.Sequential(
    nn.Linear(32, 64 * 49), nn.ReLU(), nn.Unflatten(1, (64, 7, 7)), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Sigmoid(),
)  # fmt: skip
critic = nn.Sequential(
    nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
    nn.Linear(64 * 49, 1),
)  # fmt: skip
of_artist = torch.optim.Adam(artist.parameters(), 2e-4, (0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), 2e-4, (0.5, 0.999))
sketches = (torch.rand(4000, 1, 28, 28) < 0.1).float()
began, warm, step = time.perf_counter(), None, 0
while True:
    real = sketches[torch.randint(4000, (16,))]
    drawn = artist(torch.randn(16, 32))
    loss = nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(drawn.detach())).mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    loss = nn.functional.softplus(-critic(drawn)).mean()
    of_artist.zero_grad()
    loss.backward()
    of_artist.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
