"""Neural ODE with an adaptive Bogacki-Shampine solver in a Lightning module.

"My steps take quite different times from one to the next, and there is an .item() inside
of the solver. Should that not all be vectorised with a fixed number of steps?"
"""

import logging
import os
import time
import warnings
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@dataclass
class ODEConfig:
    dim: int = 8
    width: int = 96
    batch: int = 192
    rtol: float = 2e-3
    atol: float = 2e-4
    max_evals: int = 120
    lr: float = 2e-3


class Field(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(c.dim + 1, c.width), nn.Tanh(), nn.Linear(c.width, c.width), nn.Tanh(), nn.Linear(c.width, c.dim)
        )

    def forward(self, t, y):
        return self.net(torch.cat([y, y.new_full((len(y), 1), t)], 1))


class AdaptiveRK23:
    """Error-controlled steps; the next step size depends on the error of the last."""

    def __init__(self, c):
        self.c = c

    def __call__(self, f, y, t1=1.0):
        c, t, h, evals = self.c, 0.0, 0.15, 1
        k1 = f(t, y)
        while t < t1 - 1e-6 and evals < c.max_evals:
            h = min(h, t1 - t)
            k2 = f(t + 0.5 * h, y + 0.5 * h * k1)
            k3 = f(t + 0.75 * h, y + 0.75 * h * k2)
            new = y + h * (2 / 9 * k1 + 1 / 3 * k2 + 4 / 9 * k3)
            k4 = f(t + h, new)
            evals += 3
            with torch.no_grad():
                err = h * (-5 / 72 * k1 + 1 / 12 * k2 + 1 / 9 * k3 - 1 / 8 * k4)
                ratio = (err / (c.atol + c.rtol * torch.maximum(y.abs(), new.abs()))).square().mean().sqrt().item()
            if ratio <= 1.0:
                t, y, k1 = t + h, new, k4
            h *= min(4.0, max(0.2, 0.9 * (ratio + 1e-9) ** (-1 / 3)))
        return y, evals


class ODEModule(L.LightningModule):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.field, self.solve = Field(c), AdaptiveRK23(c)
        self.read = nn.Linear(c.dim, c.dim)
        self.evals = []

    def training_step(self, batch, i):
        y0, target = batch
        end, n = self.solve(self.field, y0)
        loss = F.mse_loss(self.read(end), target)
        self.evals.append(n)
        if self.global_step % 50 == 49:
            print(
                f"step {self.global_step} mse {loss.item():.4f} evals {sum(self.evals) / len(self.evals):.1f}",
                flush=True,
            )
            self.evals.clear()
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.c.lr)


class StopAfter(L.Callback):
    def on_train_start(self, trainer, module):
        self.t0, self.mark, self.n0 = time.perf_counter(), None, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        if self.mark is None and now - self.t0 > 2:
            self.mark, self.n0 = now, trainer.global_step
        if now - self.t0 > SECONDS:
            self.ms = 1e3 * (now - self.mark) / max(1, trainer.global_step - self.n0)
            trainer.should_stop = True


class Flows(Dataset):
    """Start points and where a rotating flow takes them; whole batches are indexed at once."""

    def __init__(self, c, n=192 * 100):
        a = torch.randn(c.dim, c.dim) / c.dim**0.5
        rot = torch.linalg.matrix_exp(3.0 * (a - a.t()))
        self.y0 = torch.randn(n, c.dim)
        self.y1 = torch.tanh(self.y0 @ rot) * (1 + 0.5 * self.y0.norm(dim=1, keepdim=True))

    def __len__(self):
        return len(self.y0)

    def __getitems__(self, idx):
        idx = torch.as_tensor(idx)
        return self.y0[idx], self.y1[idx]


if __name__ == "__main__":
    cfg = ODEConfig()
    L.seed_everything(2, verbose=False)
    loader = DataLoader(Flows(cfg), cfg.batch, shuffle=True, drop_last=True, collate_fn=lambda b: b)
    clock = StopAfter()
    L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[clock],
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(ODEModule(cfg), loader)
    print(f"step_ms {clock.ms:.3f}")
