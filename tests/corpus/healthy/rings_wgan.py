"""WGAN-GP on points from rings, five critic updates to one of the generator.

"Most of my time goes into the critic: it does three forwards and a double backward,
five times over, for each step of the generator. Is there a mistake in my loop?"
"""

import itertools
import math
import os
import time
from dataclasses import dataclass

import torch
import torch.nn as nn

SECONDS = float(os.environ.get("SECONDS", "22"))


@dataclass
class GANConfig:
    latent: int = 16
    width: int = 192
    batch: int = 256
    n_critic: int = 5
    gp: float = 10.0
    lr: float = 1e-4
    report: int = 50


def mlp(*dims, act=nn.SiLU):
    mods = []
    for a, b in itertools.pairwise(dims):
        mods += [nn.Linear(a, b), act()]
    return nn.Sequential(*mods[:-1])


class Rings:
    def __init__(self, n=50_000):
        r = torch.randint(1, 4, (n,)).float() * 0.6
        phi = 2 * math.pi * torch.rand(n)
        self.points = torch.stack([r * phi.cos(), r * phi.sin()], 1) + 0.03 * torch.randn(n, 2)

    def draw(self, n):
        return self.points[torch.randint(0, len(self.points), (n,))]


class GradientPenalty:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, critic, real, fake):
        a = torch.rand(len(real), 1)
        mid = (a * real + (1 - a) * fake).requires_grad_()
        (g,) = torch.autograd.grad(critic(mid).sum(), mid, create_graph=True)
        return self.weight * (g.norm(dim=1) - 1).square().mean()


class Meter:
    def __init__(self):
        self.total, self.n = torch.zeros(()), 0

    def add(self, v):
        self.total += v.detach()
        self.n += 1

    def pop(self):
        mean = (self.total / max(1, self.n)).item()
        self.total.zero_()
        self.n = 0
        return mean


class GANTrainer:
    def __init__(self, cfg):
        torch.manual_seed(0)
        self.cfg = cfg
        self.data = Rings()
        self.gen = mlp(cfg.latent, cfg.width, cfg.width, 2)
        self.critic = mlp(2, cfg.width, cfg.width, cfg.width, 1)
        self.opt_g = torch.optim.Adam(self.gen.parameters(), cfg.lr, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.critic.parameters(), cfg.lr, betas=(0.0, 0.9))
        self.penalty = GradientPenalty(cfg.gp)
        self.w_dist = Meter()

    def noise(self):
        return torch.randn(self.cfg.batch, self.cfg.latent)

    def critic_step(self):
        real = self.data.draw(self.cfg.batch)
        with torch.no_grad():
            fake = self.gen(self.noise())
        gap = self.critic(real).mean() - self.critic(fake).mean()
        loss = -gap + self.penalty(self.critic, real, fake)
        self.opt_c.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_c.step()
        self.w_dist.add(gap)

    def gen_step(self):
        self.critic.requires_grad_(False)
        loss = -self.critic(self.gen(self.noise())).mean()
        self.opt_g.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_g.step()
        self.critic.requires_grad_(True)

    def train(self):
        t0, step, mark, n0 = time.perf_counter(), 0, None, 0
        while time.perf_counter() - t0 < SECONDS:
            for _ in range(self.cfg.n_critic):
                self.critic_step()
            self.gen_step()
            step += 1
            if mark is None and time.perf_counter() - t0 > 2:
                mark, n0 = time.perf_counter(), step
            if step % self.cfg.report == 0:
                print(f"step {step} wasserstein {self.w_dist.pop():.4f}", flush=True)
        return 1e3 * (time.perf_counter() - mark) / max(1, step - n0)


if __name__ == "__main__":
    print(f"step_ms {GANTrainer(GANConfig()).train():.3f}")
