"""Mixture density network for wind forecasts: 24 Gaussian components, log-likelihood folded lazily.
Author's remark: "no loop at all, the generator is evaluated only once"."""

import functools
import math
import operator
import os
import time

import torch
from torch import nn
from torch.distributions import Independent, Normal

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
K, OUT = 24, 4


class Wind(nn.Module):
    def __init__(self, inputs=48, width=384):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.mix = nn.Linear(width, K)
        self.mean = nn.Linear(width, K * OUT)
        self.spread = nn.Linear(width, K * OUT)

    def forward(self, x):
        h = self.trunk(x)
        return (
            self.mix(h).log_softmax(-1),
            self.mean(h).view(-1, K, OUT),
            nn.functional.softplus(self.spread(h)).view(-1, K, OUT) + 1e-3,
        )


def component(y, logw, mean, spread):
    return operator.add(logw, Independent(Normal(mean, spread, validate_args=False), 1).log_prob(y))


def log_likelihood(y, logw, mean, spread):
    if CURED:
        z = (y.unsqueeze(1) - mean) / spread
        each = (-0.5 * z * z - spread.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        return (logw + each).logsumexp(1)
    parts = map(component, [y] * K, logw.unbind(1), mean.unbind(1), spread.unbind(1))
    return functools.reduce(torch.logaddexp, parts)  # cause: small-operations-loop


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(20_000, 48)
    y = torch.stack([x[:, i].sin() * x[:, i + 4] for i in range(OUT)], 1) + 0.1 * torch.randn(20_000, OUT)
    model = Wind()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    t0 = time.perf_counter()
    warm = None
    step = 0
    while time.perf_counter() - t0 < SECONDS:
        pick = torch.randint(0, len(x), (320,))
        loss = -log_likelihood(y[pick], *model(x[pick])).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        step += 1
        if warm is None and time.perf_counter() - t0 > 2:
            warm = (time.perf_counter(), step)
    print(f"step_ms {1e3 * (time.perf_counter() - warm[0]) / (step - warm[1]):.3f}", flush=True)


if __name__ == "__main__":
    main()
