"""Trains a forecast of the delays of trams with Lightning; a callback watches a robust average of the losses.

"A mean jumps with each traffic jam, so I show the median. It is just a number in the progress bar."
"""

import os
import statistics
import time
import warnings
from collections import deque

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Typical(L.Callback):
    """The median loss of the last samples."""

    def __init__(self, window=30_000):
        self.losses = deque(maxlen=window)
        self.value = float("nan")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.extend(outputs["each"].tolist())
        if not CURED or batch_idx % 300 == 0:
            self.value = statistics.median(self.losses)  # cause: hot-line


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.step = time.perf_counter(), None, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.step += 1
        now = time.perf_counter()
        if self.warm is None and now - self.began > 2:
            self.warm = self.step, now
        if now - self.began > SECONDS:
            print(f"step_ms {1000 * (now - self.warm[1]) / (self.step - self.warm[0]):.3f}", flush=True)
            trainer.should_stop = True


class Delays(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.stop = nn.Embedding(900, 32)
        self.layers = nn.Sequential(
            nn.Linear(44, 384),
            nn.SiLU(),
            nn.Linear(384, 384),
            nn.SiLU(),
            nn.Linear(384, 384),
            nn.SiLU(),
            nn.Linear(384, 1),
        )

    def training_step(self, batch, batch_idx):
        stops, weather, late = batch
        told = self.layers(torch.cat([self.stop(stops), weather], 1)).squeeze(1)
        each = nn.functional.smooth_l1_loss(told, late, reduction="none")
        return {"loss": each.mean(), "each": each.detach()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    stops, weather = torch.randint(900, (60_000,)), torch.randn(60_000, 12)
    table = TensorDataset(stops, weather, weather[:, 0].exp() + torch.rand(60_000))
    loader = DataLoader(
        table,
        batch_size=None,
        sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(table), 512, drop_last=True),
    )
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Typical(), Clock()],
    )
    trainer.fit(Delays(), loader)


if __name__ == "__main__":
    main()
