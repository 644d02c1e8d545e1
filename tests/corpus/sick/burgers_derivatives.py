"""Physics-informed network for Burgers' equation, after a well-known PINN repository.

"A 5x48 tanh network is tiny, but second derivatives through autograd are known to be
this slow. I guess the only way out is to rewrite everything in JAX."
"""

import itertools
import math
import os
import time
from dataclasses import dataclass

import torch
import torch.nn as nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@dataclass
class PINNConfig:
    depth: int = 5
    width: int = 48
    n_inner: int = 3000
    n_edge: int = 200
    n_init: int = 200
    nu: float = 0.01 / math.pi
    lr: float = 1e-3
    resample_every: int = 100
    print_every: int = 100


class TanhNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        dims = [2] + [cfg.width] * cfg.depth + [1]
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(dims)])
        for linear in self.linears:
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x, t):
        h = torch.cat([x, t], dim=1)
        for linear in self.linears[:-1]:
            h = torch.tanh(linear(h))
        return self.linears[-1](h)


def grad(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Burgers:
    """u_t + u u_x - nu u_xx = 0 on [-1, 1] x [0, 1]."""

    def __init__(self, net, nu):
        self.net, self.nu = net, nu

    def u(self, x, t):
        return self.net(x, t)

    def u_t(self, x, t):
        return grad(self.u(x, t), t)

    def u_x(self, x, t):
        return grad(self.u(x, t), x)

    def u_xx(self, x, t):
        return grad(self.u_x(x, t), x)

    def residual(self, x, t):
        if CURED:
            u = self.u(x, t)
            u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            return u_t + u * u_x - self.nu * grad(u_x, x)
        return (  # cause: hot-line
            self.u_t(x, t) + self.u(x, t) * self.u_x(x, t) - self.nu * self.u_xx(x, t)
        )

    def initial(self, x):
        return self.u(x, torch.zeros_like(x)) + torch.sin(math.pi * x)

    def boundary(self, t):
        side = torch.cat([torch.ones_like(t), -torch.ones_like(t)])
        return self.u(side, torch.cat([t, t]))


class Collocation:
    def __init__(self, cfg):
        self.cfg, self.age = cfg, 0
        self.gen = torch.Generator().manual_seed(0)
        self.renew()

    def _rand(self, n, lo, hi):
        return lo + (hi - lo) * torch.rand(n, 1, generator=self.gen)

    def renew(self):
        c = self.cfg
        self.x = self._rand(c.n_inner, -1, 1).requires_grad_()
        self.t = self._rand(c.n_inner, 0, 1).requires_grad_()
        self.x0 = self._rand(c.n_init, -1, 1)
        self.tb = self._rand(c.n_edge, 0, 1)

    def tick(self):
        self.age += 1
        if self.age % self.cfg.resample_every == 0:
            self.renew()


class LossBook:
    def __init__(self, names):
        self.names, self.last = names, {}

    def put(self, *vals):
        self.last = {n: v.detach() for n, v in zip(self.names, vals, strict=False)}

    def __str__(self):
        return " ".join(f"{n} {v.item():.2e}" for n, v in self.last.items())


class Solver:
    def __init__(self, cfg):
        torch.manual_seed(0)
        self.cfg = cfg
        self.net = TanhNet(cfg)
        self.pde = Burgers(self.net, cfg.nu)
        self.points = Collocation(cfg)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=cfg.lr)
        self.book = LossBook(["pde", "ic", "bc"])

    def losses(self):
        p = self.points
        return (
            self.pde.residual(p.x, p.t).square().mean(),
            self.pde.initial(p.x0).square().mean(),
            self.pde.boundary(p.tb).square().mean(),
        )

    def iterate(self):
        parts = self.losses()
        self.opt.zero_grad(set_to_none=True)
        sum(parts).backward(inputs=list(self.net.parameters()))
        self.opt.step()
        self.book.put(*parts)
        self.points.tick()

    def solve(self):
        t0, it, mark, n0 = time.perf_counter(), 0, None, 0
        while time.perf_counter() - t0 < SECONDS:
            self.iterate()
            it += 1
            if mark is None and time.perf_counter() - t0 > 2:
                mark, n0 = time.perf_counter(), it
            if it % self.cfg.print_every == 0:
                print(f"it {it} {self.book}", flush=True)
        return 1e3 * (time.perf_counter() - mark) / max(1, it - n0)


if __name__ == "__main__":
    print(f"step_ms {Solver(PINNConfig()).solve():.3f}")
