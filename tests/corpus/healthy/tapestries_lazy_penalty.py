"""Weaves small tapestries with a GAN whose critic is kept smooth by a penalty at every sixteenth step.

"Most steps take about the same time, then comes one that takes nearly twice as long. Something seems to stall."
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
BATCH, SIDE, LATENT, EVERY, GAMMA = 24, 32, 64, 16, 1.0


def tapestries(count):
    along = torch.linspace(0, 1, SIDE)
    across, down, phase = (torch.rand(count, 3, 1, 1) * scale for scale in (40, 40, 6.28))
    return torch.sin(across * along + down * along[:, None] + phase)


def weaver():
    return nn.Sequential(
        nn.Linear(LATENT, 64 * 16), nn.Unflatten(1, (64, 4, 4)), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(64, 48, 4, 2, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(48, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic():
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 48, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(48, 64, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(), nn.Linear(64 * 16, 1),
    )  # fmt: skip


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = tapestries(3000).contiguous(memory_format=torch.channels_last)
    weave, judge = (each.to(memory_format=torch.channels_last) for each in (weaver(), critic()))
    at_weave = torch.optim.Adam(weave.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=True)
    at_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=True)
    began, mark, step = time.perf_counter(), None, 0
    while True:
        real = data[torch.randint(len(data), (BATCH,))]
        fake = weave(torch.randn(BATCH, LATENT))

        on_real, on_fake = judge(torch.cat((real, fake.detach()))).chunk(2)
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        if step % EVERY == 0:
            real.requires_grad_(True)
            (slope,) = torch.autograd.grad(judge(real).sum(), real, create_graph=True)
            loss = loss + EVERY * GAMMA / 2 * slope.square().sum((1, 2, 3)).mean()
        at_judge.zero_grad()
        loss.backward()
        at_judge.step()

        judge.requires_grad_(False)
        fooled = F.softplus(-judge(fake)).mean()
        at_weave.zero_grad()
        fooled.backward()
        at_weave.step()
        judge.requires_grad_(True)

        step += 1
        if step % 200 == 0:
            print(f"{step}: critic {loss.item():.3f}, weaver {fooled.item():.3f}", flush=True)
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
