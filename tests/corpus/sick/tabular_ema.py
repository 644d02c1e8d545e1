"""Denoising diffusion on table rows (TabDDPM style), with averaged weights for sampling.

Own small training class; the averaged model is what gets exported in the end.

"Without the averaging it trains much faster. The paper's authors average as well, and say nothing about a price.
It is only one multiply-add per weight, isn't it?"
"""

import copy
import math
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def table(rows=30_000, columns=40):
    gen = torch.Generator().manual_seed(6)
    mix = torch.randn(8, columns, generator=gen)
    x = torch.tanh(torch.randn(rows, 8, generator=gen) @ mix)
    return (x - x.mean(0)) / x.std(0)


class Denoiser(nn.Module):
    def __init__(self, columns, width=512, depth=4):
        super().__init__()
        self.inp = nn.Linear(columns, width)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, columns)

    def forward(self, x, t):
        freq = torch.exp(torch.arange(32) * (-math.log(1e4) / 32))
        angle = t[:, None] * 1000 * freq
        h = self.inp(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))
        for layer in self.body:
            h = h + torch.nn.functional.silu(layer(h))
        return self.out(h)


class Average:
    def __init__(self, model, decay=0.999):
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        if CURED:
            for mine, new in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.lerp_(new, 1 - self.decay)
            return
        state = copy.deepcopy(self.model.state_dict())  # cause: hot-line
        for name, new in copy.deepcopy(model.state_dict()).items():
            state[name] = self.decay * state[name] + (1 - self.decay) * new
        self.model.load_state_dict(state)


class Fitter:
    def __init__(self, data, batch=64, lr=5e-4):
        self.data, self.batch = data, batch
        self.net = Denoiser(data.shape[1])
        self.average = Average(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.losses = []

    def batches(self):
        while True:
            for rows in torch.randperm(len(self.data)).split(self.batch):
                if len(rows) == self.batch:
                    yield self.data[rows]

    def one(self, x):
        t = torch.rand(len(x))
        alpha = torch.cos(t * math.pi / 2)[:, None]
        noise = torch.randn_like(x)
        found = self.net(alpha * x + (1 - alpha**2).sqrt() * noise, t)
        loss = nn.functional.mse_loss(found, noise)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.average.update(self.net)
        self.losses.append(loss.detach())

    def run(self, seconds):
        begin, warm, n = time.perf_counter(), None, 0
        for x in self.batches():
            self.one(x)
            n += 1
            t = time.perf_counter() - begin
            if warm is None and t > 2:
                warm = t, n
            if n % 200 == 0:
                print(f"{n}: {torch.stack(self.losses).mean():.4f}")
                self.losses.clear()
            if t > seconds:
                return 1000 * (t - warm[0]) / (n - warm[1])
        return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(2)
    print(f"step_ms {Fitter(table()).run(SECONDS):.3f}", flush=True)
