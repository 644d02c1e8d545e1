"""Generates profiles of sand ripples with a Wasserstein critic and a gradient penalty.

Each step is three updates of the critic and one of the generator; the penalty needs the gradient of a gradient.

"create_graph=True and an extra autograd.grad in each update look expensive, am I doing something wrong?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)
LENGTH, NOISE, BATCH, CRITIC_UPDATES, PENALTY = 64, 32, 32, 3, 10.0


def make_profiles(count=5000):
    g = torch.Generator().manual_seed(1)
    x = torch.linspace(0, 6.28, LENGTH)
    waves = 2 + 4 * torch.rand(count, 1, generator=g)
    phase = 6.28 * torch.rand(count, 1, generator=g)
    steep = 0.4 * torch.rand(count, 1, generator=g)
    ripple = torch.sin(waves * x + phase) + steep * torch.sin(2 * waves * x + 2 * phase)
    return 0.7 * ripple + 0.03 * torch.randn(count, LENGTH, generator=g)


def make_generator(width=128):
    return nn.Sequential(
        nn.Linear(NOISE, width), nn.SiLU(),
        nn.Linear(width, 16 * 16), nn.SiLU(), nn.Unflatten(1, (16, 16)),
        nn.Upsample(scale_factor=2), nn.Conv1d(16, 32, 5, padding=2), nn.SiLU(),
        nn.Upsample(scale_factor=2), nn.Conv1d(32, 1, 5, padding=2), nn.Flatten(),
    )  # fmt: skip


def make_critic():
    return nn.Sequential(
        nn.Unflatten(1, (1, LENGTH)),
        nn.Conv1d(1, 24, 5, 2, 2), nn.SiLU(), nn.Conv1d(24, 48, 5, 2, 2), nn.SiLU(),
        nn.Flatten(), nn.Linear(48 * LENGTH // 4, 64), nn.SiLU(), nn.Linear(64, 1),
    )  # fmt: skip


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return PENALTY * (slope.norm(dim=1) - 1).square().mean()


def main():
    torch.manual_seed(0)
    profiles = make_profiles()
    gen, critic = make_generator(), make_critic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-4, betas=(0.0, 0.9), fused=True)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9), fused=True)
    step, mark = 0, None
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        for _ in range(CRITIC_UPDATES):
            real = profiles[torch.randint(len(profiles), (BATCH,))]
            with torch.no_grad():
                fake = gen(torch.randn(BATCH, NOISE))
            scores = critic(torch.cat([real, fake]))
            distance = scores[:BATCH].mean() - scores[BATCH:].mean()
            loss = penalty(critic, real, fake) - distance
            opt_c.zero_grad()
            loss.backward()
            opt_c.step()

        critic.requires_grad_(False)
        loss_g = -critic(gen(torch.randn(BATCH, NOISE))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        critic.requires_grad_(True)
        step += 1
        if step % 100 == 0:
            print(f"step {step} distance {distance.item():.4f} generator {loss_g.item():.4f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
