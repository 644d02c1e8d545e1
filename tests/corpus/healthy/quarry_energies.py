"""Learns an energy for readings of quarry blasts; each step first walks twenty times downhill with noise.

The walkers are kept between the steps, as in persistent contrastive divergence; one in twenty is started anew.

"For one step of the optimizer I go forward and backward through the network twenty times. That cannot be right."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
READINGS, WIDTH, BATCH, WALKERS, WALK = 64, 256, 192, 6144, 20


def blasts(count):
    when = torch.linspace(0, 1, READINGS)
    start, tone = torch.rand(count, 1) * 0.5, 4 + 8 * torch.rand(count, 1)
    after = (when - start).clamp(min=0)
    return torch.sin(6.28 * tone * after) * torch.exp(-4 * after) + 0.03 * torch.randn(count, READINGS)


def walk(energy, place):
    """Langevin dynamics: every step needs the slope at the place that the last one came to."""
    energy.requires_grad_(False)
    noise = torch.randn(WALK, *place.shape).mul_(0.01)
    for kick in noise:
        place.requires_grad_(True)
        (slope,) = torch.autograd.grad(energy(place).sum(), place)
        place = place.detach().sub_(slope.clamp_(-0.03, 0.03)).add_(kick)
    energy.requires_grad_(True)
    return place


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = blasts(20_000)
    energy = nn.Sequential(
        nn.Linear(READINGS, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.Adam(energy.parameters(), lr=1e-4, betas=(0.0, 0.999), fused=True)
    walkers = torch.rand(WALKERS, READINGS) * 2 - 1
    began, mark, step, gap = time.perf_counter(), None, 0, torch.zeros(())
    while True:
        chosen = torch.randint(WALKERS, (BATCH,))
        place = walkers[chosen]
        place[: BATCH // 20] = torch.rand(BATCH // 20, READINGS) * 2 - 1
        place = walk(energy, place)
        walkers[chosen] = place
        real, fake = energy(torch.cat((data[torch.randint(len(data), (BATCH,))], place))).chunk(2)
        difference = real.mean() - fake.mean()
        loss = difference + 0.1 * (real.square().mean() + fake.square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gap += difference.detach()
        step += 1
        if step % 100 == 0:
            print(f"{step}: gap {gap.item() / 100:.4f}", flush=True)
            gap.zero_()
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
