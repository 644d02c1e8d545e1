"""Predicts the faults of ceramics from the log of the kiln with Lightning, and keeps a running mean of the weights.

"The averaged weights are clearly better, so the averaging has to stay. But is it normal that they cost me a good part
of the speed? It is one multiplication per weight."
"""

import copy
import os
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
SENSORS, FAULTS, DECAY = 320, 9, 0.995
warnings.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


class Kiln(L.LightningModule):
    def __init__(self, width=288, depth=6):
        super().__init__()
        blocks = [Block(width) for _ in range(depth)]
        self.network = nn.Sequential(nn.Linear(SENSORS, width), *blocks, nn.Linear(width, FAULTS))

    def training_step(self, batch, _):
        sensors, fault = batch
        return nn.functional.cross_entropy(self.network(sensors), fault)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class RunningMean(Callback):
    """Keeps the mean of the network's weights over the last few hundred steps."""

    def on_fit_start(self, trainer, module):
        self.mean = copy.deepcopy(module.network)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if CURED:
            for mean, weight in zip(self.mean.parameters(), module.network.parameters(), strict=True):
                mean.lerp_(weight, 1 - DECAY)
            return
        fresh = copy.deepcopy(module.network)  # cause: hot-line
        for new, mean in zip(fresh.parameters(), self.mean.parameters(), strict=True):
            new.lerp_(mean, DECAY)
        self.mean = fresh


class Clock(Callback):
    def __init__(self):
        self.began, self.mark, self.last = time.perf_counter(), None, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.last = trainer.global_step, now
        if self.mark is None and now - self.began > 2:
            self.mark = self.last
        if now - self.began > SECONDS:
            trainer.should_stop = True


def firings(n=8192):
    g = torch.Generator().manual_seed(3)
    fault = torch.randint(FAULTS, (n,), generator=g)
    look = torch.randn(FAULTS, SENSORS, generator=g)
    return TensorDataset(0.3 * look[fault] + torch.randn(n, SENSORS, generator=g), fault)


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        callbacks=[RunningMean(), clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Kiln(), DataLoader(firings(), batch_size=32, shuffle=True, drop_last=True))
    (n, then), (m, now) = clock.mark, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
