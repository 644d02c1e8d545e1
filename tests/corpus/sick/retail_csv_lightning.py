"""Trains a forecast of sales with Lightning; each step logs figures of each shop to a CSV file.

"The logger is the standard one, so it cannot be that."
"""

import os
import tempfile
import time

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
EVERY = 50 if CURED else 1


class Sales(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(100, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 60))

    def training_step(self, batch, index):
        before, after = batch
        error = (self.net(before) - after).abs()
        if index % EVERY == 0:
            for shop, value in enumerate(error.mean(0)):
                self.log(f"shop_{shop}", value)  # cause: logging-stall or hot-line
        return error.mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Clock(L.Callback):
    warm = None

    def on_train_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_batch_start(self, trainer, *rest):
        self.last = trainer.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last


torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.rand(51_200, 100), torch.rand(51_200, 60)), batch_size=256)
clock = Clock()
trainer = L.Trainer(
    max_epochs=-1, max_time={"seconds": SECONDS}, accelerator="cpu", callbacks=[clock], enable_checkpointing=False,
    log_every_n_steps=EVERY, logger=CSVLogger(tempfile.mkdtemp(), flush_logs_every_n_steps=EVERY),
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Sales(), loader)
(first, at), (last, then) = clock.warm, clock.last
print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
