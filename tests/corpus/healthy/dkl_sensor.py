"""Train a deep-kernel Gaussian process on sensor calibration data.

An MLP gives features, an RBF kernel over them gives the covariance, the exact marginal
likelihood of a batch of 400 points needs a Cholesky decomposition in each step.

"Half of the step is a decomposition in linalg, is that avoidable?"
"""

import math
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)
N, BATCH, VAL_EVERY = 8000, 400, 300


def make_data():
    g = torch.Generator().manual_seed(2)
    x = torch.rand(N, 8, generator=g) * 4 - 2
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + 0.3 * x[:, 2] ** 2 + 0.1 * torch.randn(N, generator=g)
    return x, (y - y.mean()) / y.std()


class DeepKernel(nn.Module):
    def __init__(self, d_in=8, d_out=4):
        super().__init__()
        self.feat = nn.Sequential(nn.Linear(d_in, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, d_out))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.tensor(-2.0))

    def kernel(self, a, b):
        za, zb = self.feat(a), self.feat(b)
        d2 = (za**2).sum(1)[:, None] + (zb**2).sum(1)[None] - 2 * za @ zb.t()
        return self.log_scale.exp() * torch.exp(-0.5 * d2.clamp_min(0))

    def chol(self, x):
        k = self.kernel(x, x)
        noise = self.log_noise.exp() + 1e-4
        return torch.linalg.cholesky(k + noise * torch.eye(len(x)))

    def nll(self, x, y):
        low = self.chol(x)
        alpha = torch.cholesky_solve(y[:, None], low)[:, 0]
        logdet = 2 * low.diagonal().log().sum()
        return 0.5 * (y @ alpha + logdet + len(y) * math.log(2 * math.pi)) / len(y)

    @torch.no_grad()
    def predict(self, xt, yt, x):
        alpha = torch.cholesky_solve(yt[:, None], self.chol(xt))
        return (self.kernel(x, xt) @ alpha)[:, 0]


def main():
    torch.manual_seed(0)
    x, y = make_data()
    xtr, ytr, xva, yva = x[:7000], y[:7000], x[7000:], y[7000:]
    gp = DeepKernel()
    opt = torch.optim.Adam(gp.parameters(), lr=2e-3)
    step, mark = 0, None
    t0 = time.perf_counter()
    while True:
        t = time.perf_counter() - t0
        if mark is None and t >= 2:
            mark = t, step
        if t >= SECONDS:
            break
        idx = torch.randint(0, len(xtr), (BATCH,))
        loss = gp.nll(xtr[idx], ytr[idx])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(gp.parameters(), 5.0)
        opt.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step} nll {loss.item():.4f} noise {gp.log_noise.exp().item():.4f}")
        if step % VAL_EVERY == 0:
            pred = gp.predict(xtr[:500], ytr[:500], xva)
            print(f"  validation rmse {(pred - yva).pow(2).mean().sqrt().item():.4f}")
    print(f"step_ms {(t - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
