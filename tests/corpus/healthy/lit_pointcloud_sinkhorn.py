"""Trains a point-cloud autoencoder with an entropic optimal-transport loss in Lightning.

The loss is a log-domain Sinkhorn iteration, which is heavy and differentiable by need.
Data: small parametric surfaces, all of them in memory.

"Most of the step is in logsumexp of the loss. That is what the paper does, and we checked that fewer
iterations give worse clouds; I only want to know if something else can be had for free."
"""

import logging
import math
import os
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

POINTS = 48


def ellipsoids(n=2000):
    g = torch.Generator().manual_seed(0)
    x = nn.functional.normalize(torch.randn(n, POINTS, 3, generator=g), dim=-1)
    return x * (0.4 + torch.rand(n, 1, 3, generator=g))


def sinkhorn(x, y, eps=0.05, iters=20):
    cost = torch.cdist(x, y) ** 2
    f = torch.zeros_like(cost[..., 0])
    g = torch.zeros_like(f)
    log_n = math.log(POINTS)
    for _ in range(iters):
        f = -eps * torch.logsumexp((g[:, None, :] - cost) / eps - log_n, dim=2)
        g = -eps * torch.logsumexp((f[:, :, None] - cost) / eps - log_n, dim=1)
    return (f + g).mean()


class CloudAE(L.LightningModule):
    def __init__(self, z=32):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 128))
        self.code = nn.Linear(128, z)
        self.dec = nn.Sequential(nn.Linear(z, 256), nn.ReLU(), nn.Linear(256, POINTS * 3))
        self.avg = MeanMetric()

    def forward(self, x):
        return self.dec(self.code(self.point(x).amax(1))).view(-1, POINTS, 3)

    def training_step(self, batch, idx):
        (x,) = batch
        loss = sinkhorn(self(x), x)
        self.avg.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_loss", self.avg.compute())
        self.avg.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Stop(L.Callback):
    t0 = ref = None

    def on_train_batch_end(self, trainer, *_):
        now = time.perf_counter()
        self.t0 = self.t0 or now
        if self.ref is None and now - self.t0 > 2:
            self.ref = now, trainer.global_step
        if now - self.t0 > SECONDS:
            trainer.should_stop = True
            self.ms = (now - self.ref[0]) / (trainer.global_step - self.ref[1]) * 1e3


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    stop = Stop()
    L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[stop],
    ).fit(
        CloudAE(), DataLoader(TensorDataset(ellipsoids()), batch_size=16, shuffle=True, drop_last=True, num_workers=0)
    )
    print(f"step_ms {stop.ms:.3f}", flush=True)
