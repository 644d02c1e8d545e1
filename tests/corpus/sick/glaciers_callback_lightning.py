"""Trains a regression of glaciers with Lightning; a callback keeps a histogram of each weight, at each step.

"It is only a callback."
"""

import os
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
EVERY = 100 if CURED else 1


class Glaciers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Histograms(L.Callback):
    warm = None

    def on_train_start(self, trainer, module):
        self.began, self.kept = time.perf_counter(), {}

    def on_train_batch_start(self, trainer, *rest):
        self.last = trainer.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last

    def on_train_batch_end(self, trainer, module, *rest):
        if trainer.global_step % EVERY == 0:
            for name, weight in module.named_parameters():
                self.kept[name] = torch.histc(weight.detach().flatten().sort().values, bins=50)  # cause: hot-line


torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.rand(51_200, 128), torch.rand(51_200, 8)), batch_size=256)
clock = Histograms()
trainer = L.Trainer(
    max_epochs=-1, max_time={"seconds": SECONDS}, accelerator="cpu", callbacks=[clock], enable_checkpointing=False,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Glaciers(), loader)
(first, at), (last, then) = clock.warm, clock.last
print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
