"""Trains a physics-informed network (Poisson equation on a square) with Accelerate.

Second derivatives by double backward are needed by the method; collocation points are
drawn anew at each step; the error against the exact solution is measured every 500 steps.

"Four autograd calls per step look like a waste, and the forward is tiny in comparison. My advisor asks whether
this is normal."
"""

import math
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)


class Siren(nn.Module):
    def __init__(self, h=96, depth=3):
        super().__init__()
        self.first = nn.Linear(2, h)
        self.mid = nn.ModuleList(nn.Linear(h, h) for _ in range(depth))
        self.last = nn.Linear(h, 1)

    def forward(self, xy):
        z = torch.sin(3 * self.first(xy))
        for m in self.mid:
            z = torch.sin(m(z))
        return self.last(z)


def exact(xy):
    return torch.sin(math.pi * xy[:, :1]) * torch.sin(math.pi * xy[:, 1:])


def residual(model, n):
    xy = torch.rand(n, 2, requires_grad=True)
    u = model(xy)
    (du,) = torch.autograd.grad(u.sum(), xy, create_graph=True)
    lap = 0
    for d in range(2):
        (dd,) = torch.autograd.grad(du[:, d].sum(), xy, create_graph=True)
        lap = lap + dd[:, d : d + 1]
    return ((lap + 2 * math.pi**2 * exact(xy)) ** 2).mean()


def boundary(model, n):
    t = torch.rand(n, 1)
    side = torch.randint(0, 2, (n, 1)).float()
    pts = torch.cat([torch.cat([t, side], 1), torch.cat([side, t], 1)])
    return (model(pts) ** 2).mean()


@torch.no_grad()
def error(model, k=24):
    g = torch.linspace(0, 1, k)
    xy = torch.cartesian_prod(g, g)
    return float((model(xy) - exact(xy)).norm() / exact(xy).norm())


def main():
    set_seed(0)
    acc = Accelerator(cpu=True)
    model = Siren()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9998)
    model, opt, sched = acc.prepare(model, opt, sched)

    losses = []
    step, mark, t0 = 0, None, time.perf_counter()
    while True:
        loss = residual(model, 256) + 100 * boundary(model, 64)
        acc.backward(loss)
        acc.clip_grad_norm_(model.parameters(), 100.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        step += 1
        losses.append(loss.item())
        if step % 500 == 0:
            acc.print(f"{step}: loss {sum(losses[-500:]) / 500:.3f} relative error {error(model):.3f}")
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = now, step
        if now - t0 > SECONDS:
            break
    print(f"step_ms {(now - mark[0]) / (step - mark[1]) * 1000:.3f}", flush=True)


if __name__ == "__main__":
    main()
