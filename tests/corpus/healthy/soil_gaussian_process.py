"""Fits an exact Gaussian process to soil moisture in double precision.

The matrix of its kernel is nearly singular: in float32 the Cholesky decomposition fails in the first steps.

"Everybody trains in float32 or less, only my process is in 64 bits."
"""

import math
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
SENSORS, JITTER = 600, 1e-8


class Process(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_length = nn.Parameter(torch.zeros(3))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.tensor(-5.0))

    def forward(self, places, moisture):
        """The negative logarithm of the marginal likelihood."""
        scaled = places / self.log_length.exp()
        squares = scaled.square().sum(-1)
        distances = (squares[:, None] + squares - 2 * scaled @ scaled.T).clamp_min(0)
        kernel = (2 * self.log_scale).exp() * torch.exp(-0.5 * distances)
        noise = (2 * self.log_noise).exp() + JITTER
        factor = torch.linalg.cholesky(kernel + torch.diag_embed(noise.expand(len(places))))
        weights = torch.cholesky_solve(moisture[:, None], factor).squeeze(-1)
        return 0.5 * moisture @ weights + factor.diagonal().log().sum() + 0.5 * len(places) * math.log(2 * math.pi)


def main():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2)
    places = torch.rand(SENSORS, 3, generator=generator).double() * 2
    moisture = torch.sin(2 * places[:, 0]) * torch.cos(places[:, 1]) + 0.3 * places[:, 2]
    moisture = moisture + 1e-3 * torch.randn(SENSORS, generator=generator).double()
    moisture = moisture - moisture.mean()

    model = Process().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        loss = model(places, moisture)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
