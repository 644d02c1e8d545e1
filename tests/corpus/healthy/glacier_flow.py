"""Neural ODE for glacier surface height, integrated with a hand-written RK4.

"Each training step calls the little network 64 times in a Python for-loop. A
colleague says Python loops kill performance, but every call really needs the
result of the one before it."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
STEPS, DT = 16, 0.1


class Flow(nn.Module):
    def __init__(self, dim=32, h=192):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(dim, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, dim))

    def rk4(self, y):
        k1 = self.f(y)
        k2 = self.f(y + 0.5 * DT * k1)
        k3 = self.f(y + 0.5 * DT * k2)
        k4 = self.f(y + DT * k3)
        return y + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def forward(self, y0):
        path, y = [], y0
        for _ in range(STEPS):
            y = self.rk4(y)
            path.append(y)
        return torch.stack(path)


def observed(n=4096, dim=32):
    g = torch.Generator().manual_seed(0)
    a = torch.randn(dim, dim, generator=g) / dim**0.5
    a = a - a.T - 0.2 * torch.eye(dim)
    step = torch.linalg.matrix_exp(a * DT)
    y, path = torch.randn(n, dim, generator=g), []
    y0 = y
    for _ in range(STEPS):
        y = y @ step.T
        path.append(y + 0.01 * torch.randn(n, dim, generator=g))
    return y0, torch.stack(path)


if __name__ == "__main__":
    torch.manual_seed(0)
    y0, path = observed()
    net = Flow()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    t0, step, mark = time.time(), 0, None
    while time.time() - t0 < SECONDS:
        b = torch.randint(0, len(y0), (256,))
        loss = (net(y0[b]) - path[:, b]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        step += 1
        if mark is None and time.time() - t0 > 2:
            mark = time.time(), step
        if step % 50 == 0:
            print(f"{step} mse {loss.item():.5f}")
    print(f"step_ms {(time.time() - mark[0]) / (step - mark[1]) * 1000:.3f}")
