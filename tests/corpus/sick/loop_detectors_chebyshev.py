"""Spatio-temporal graph convolutions forecasting the speed at highway loop detectors.

"Forecasting 325 sensors with a model of a few thousand parameters should fly. Lowering the hidden
width from 32 to 12 changed little, so I believe PyTorch simply has a fixed overhead
for graph networks and I would need CUDA kernels for ChebConv."
"""

import itertools
import os
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@dataclass
class STConfig:
    n_sensors: int = 325
    n_hist: int = 12
    n_pred: int = 3
    hidden: int = 12
    cheb_k: int = 3
    n_blocks: int = 3
    batch_size: int = 4
    lr: float = 2e-3
    seed: int = 7


class RoadGraph(nn.Module):
    """Thresholded Gaussian kernel of the road distances, as in DCRNN."""

    def __init__(self, coords, order, sigma=0.12, eps=0.1):
        super().__init__()
        dist = torch.cdist(coords, coords)
        adj = torch.exp(-((dist / sigma) ** 2))
        adj = torch.where(adj < eps, torch.zeros_like(adj), adj)
        adj.fill_diagonal_(0.0)
        self.order = order
        self.register_buffer("adj", adj)
        self._supports = None

    def scaled_laplacian(self):
        deg = self.adj.sum(1).clamp_min(1e-6)
        d_inv = deg.rsqrt()
        eye = torch.eye(self.adj.size(0))
        lap = eye - d_inv[:, None] * self.adj * d_inv[None, :]
        lam = torch.linalg.matrix_norm(lap, ord=2)  # cause: hot-line
        return 2.0 * lap / lam - eye

    def polynomials(self):
        lap = self.scaled_laplacian()  # cause: hot-line
        polys = [torch.eye(lap.size(0)), lap]
        for _ in range(2, self.order):
            polys.append(2.0 * lap @ polys[-1] - polys[-2])
        return torch.stack(polys)

    def supports(self):
        if CURED:
            if self._supports is None:
                self._supports = self.polynomials()
            return self._supports
        return self.polynomials()  # cause: hot-line


class ChebConv(nn.Module):
    def __init__(self, graph, c_in, c_out):
        super().__init__()
        self.graph = graph
        self.theta = nn.Linear(c_in * graph.order, c_out)

    def forward(self, x):  # B T N C
        supports = self.graph.supports()  # cause: hot-line
        mixed = torch.einsum("kmn,btnc->btmkc", supports, x)
        return self.theta(mixed.flatten(-2))


class GatedTemporal(nn.Module):
    def __init__(self, c_in, c_out, width=3):
        super().__init__()
        self.conv = nn.Conv2d(c_in, 2 * c_out, (width, 1), padding=(width // 2, 0))

    def forward(self, x):
        a, b = self.conv(x.permute(0, 3, 1, 2)).chunk(2, dim=1)
        return (a * torch.sigmoid(b)).permute(0, 2, 3, 1)


class STBlock(nn.Module):
    def __init__(self, graph, c_in, c_out):
        super().__init__()
        self.t1 = GatedTemporal(c_in, c_out)
        self.g = ChebConv(graph, c_out, c_out)
        self.norm = nn.LayerNorm(c_out)

    def forward(self, x):
        return self.norm(F.relu(self.g(self.t1(x))))


class STGCN(nn.Module):
    def __init__(self, cfg, coords):
        super().__init__()
        graph = RoadGraph(coords, cfg.cheb_k)
        widths = [1] + [cfg.hidden] * cfg.n_blocks
        self.blocks = nn.Sequential(*[STBlock(graph, a, b) for a, b in itertools.pairwise(widths)])
        self.out = nn.Linear(cfg.hidden * cfg.n_hist, cfg.n_pred)

    def forward(self, x):
        h = self.blocks(x).permute(0, 2, 1, 3).flatten(2)
        return self.out(h)


class Trainer:
    def __init__(self, cfg):
        torch.manual_seed(cfg.seed)
        self.cfg = cfg
        self.net = STGCN(cfg, torch.rand(cfg.n_sensors, 2))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=cfg.lr)
        t = torch.arange(4000)[:, None] / 288.0
        phase = torch.rand(1, cfg.n_sensors)
        self.series = torch.sin(6.283 * (t + phase)) + 0.1 * torch.randn(4000, cfg.n_sensors)
        self.span = torch.arange(cfg.n_hist + cfg.n_pred)

    def batch(self):
        start = torch.randint(0, 4000 - len(self.span), (self.cfg.batch_size, 1))
        win = self.series[start + self.span]
        return win[:, : self.cfg.n_hist, :, None], win[:, self.cfg.n_hist :].transpose(1, 2)

    def fit(self):
        begin = time.perf_counter()
        mark, counted, step = None, 0, 0
        while (now := time.perf_counter()) - begin < SECONDS:
            if mark is None and now - begin > 2:
                mark, counted = now, step
            x, y = self.batch()
            loss = F.l1_loss(self.net(x), y)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            step += 1
            if step % 100 == 0:
                print(f"step {step} mae {loss.item():.4f}", flush=True)
        return 1e3 * (time.perf_counter() - mark) / max(1, step - counted)


if __name__ == "__main__":
    print(f"step_ms {Trainer(STConfig()).fit():.3f}")
