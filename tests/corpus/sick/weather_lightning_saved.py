# cause: checkpoint-stall no-line
"""Trains a forecast of temperatures with Lightning, which keeps the last checkpoint.

"The first hour was fine, then somebody asked for checkpoints."
"""

import os
import tempfile
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(240, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 24))

    def training_step(self, batch, index):
        past, future = batch
        return nn.functional.l1_loss(self.net(past), future)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    warm = None

    def on_train_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_batch_start(self, trainer, *rest):
        self.last = trainer.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last


torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.rand(6400, 240), torch.rand(6400, 24)), batch_size=32)
clock = Clock()
save = ModelCheckpoint(tempfile.mkdtemp(), every_n_train_steps=200 if CURED else 5)
trainer = L.Trainer(
    max_epochs=-1, max_time={"seconds": SECONDS}, accelerator="cpu", logger=False, callbacks=[clock, save],
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Forecast(), loader)
(first, at), (last, then) = clock.warm, clock.last
print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
