"""Samples the weights of a network for rainfall by Langevin dynamics; the scale of the noise is fitted with Adam.

No optimizer has the weights: each step adds half of their gradient, and noise, as in the first paper on it.

"Adam has a single number and all the rest is by hand. Does that cost me?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
STATIONS, BATCH, RATE = 20_000, 2048, 2e-6


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weather = torch.randn(STATIONS, 96)
    rain = weather[:, :8].sin().sum(1, keepdim=True) + 0.3 * torch.randn(STATIONS, 1)

    model = nn.Sequential(nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    log_scale = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adam([log_scale], lr=1e-3)
    weights = list(model.parameters())
    began, warm, step = time.perf_counter(), None, 0
    while True:
        chosen = torch.randint(STATIONS, (BATCH,))
        error = (model(weather[chosen]) - rain[chosen]).square().mean()
        energy = STATIONS * (0.5 * error * torch.exp(-2 * log_scale) + log_scale)
        for each in weights:
            each.grad = None
        optimizer.zero_grad()
        energy.backward()
        optimizer.step()
        for each in weights:
            each.data.add_(each.grad + each.data, alpha=-0.5 * RATE)  # the prior of the weights is normal
            each.data.add_(torch.randn_like(each.data), alpha=RATE**0.5)
        step += 1
        if step % 100 == 0:
            print(f"step {step} error {error.item():.4f} scale {log_scale.exp().item():.3f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
