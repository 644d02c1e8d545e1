"""Neural differential equation for lynx and hare counts: Runge-Kutta steps through a small network.

Every step of the solver needs the one before, so the run consists of a great many small operations.

"Is it my fault that the GPU box next door is no faster with this than my laptop?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
YEARS, SUBSTEPS = 20, 2


def true_rates(z):
    hare, lynx = z[:, :1], z[:, 1:]
    return torch.cat([hare * (0.9 - 0.6 * lynx), lynx * (0.5 * hare - 0.7)], 1)


def runge_kutta(rates, z, dt):
    k1 = rates(z)
    k2 = rates(torch.add(z, k1, alpha=dt / 2))
    k3 = rates(torch.add(z, k2, alpha=dt / 2))
    k4 = rates(torch.add(z, k3, alpha=dt))
    return torch.add(z, k1 + 2 * (k2 + k3) + k4, alpha=dt / 6)


def integrate(rates, z0, years=YEARS, dt=0.25):
    path, z = [z0], z0
    for _ in range(years):
        for _ in range(SUBSTEPS):
            z = runge_kutta(rates, z, dt / SUBSTEPS)
        path.append(z)
    return torch.stack(path, 1)


@torch.no_grad()
def field_counts(n=2048):
    start = torch.rand(n, 2) + 0.5
    path = integrate(true_rates, start)
    return path * (1 + 0.02 * torch.randn_like(path))


class Rates(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )

    def forward(self, z):
        return self.net(z) * z


class Fit:
    def __init__(self, counts, batch=256):
        self.counts, self.batch = counts, batch
        self.rates = Rates()
        self.optimizer = torch.optim.Adam(self.rates.parameters(), lr=3e-3)

    def loss(self, observed):
        path = integrate(self.rates, observed[:, 0])
        return (path - observed).abs().mean()

    def epoch(self, deadline, ends):
        for rows in torch.randperm(len(self.counts)).split(self.batch):
            loss = self.loss(self.counts[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            ends.append(time.perf_counter())
            if ends[-1] > deadline:
                break
        return loss


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fit = Fit(field_counts())
    ends, epochs = [], 0
    deadline = time.perf_counter() + SECONDS
    while not ends or ends[-1] <= deadline:
        loss = fit.epoch(deadline, ends)
        epochs += 1
        if epochs % 20 == 0:
            print(f"epoch {epochs} mean deviation {loss.item():.4f}")
    ends = ends[len(ends) // 10 :]
    print(f"epochs={epochs} step_ms {(ends[-1] - ends[0]) / (len(ends) - 1) * 1e3:.3f}")


if __name__ == "__main__":
    main()
