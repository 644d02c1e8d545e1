"""Forecasts the flow in aqueducts from the last two days of their gauges, with Lightning.

All readings are one table in memory, as they came out of the archive.

"No file is touched after the start, and still more workers help a bit. But I have only two cores."
"""

import os
import time

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
GAUGES, HOURS, PAST, AHEAD = 40, 720, 48, 12


def archive():
    rng = np.random.default_rng(0)
    table = np.zeros(GAUGES * HOURS, dtype=[("gauge", "U6"), ("hour", "i4"), ("reading", "f4", (5,))])
    for number in range(GAUGES):
        part = table[number * HOURS : (number + 1) * HOURS]
        part["gauge"], part["hour"] = f"G{number:04d}", np.arange(HOURS)
        part["reading"] = np.sin(np.arange(HOURS)[:, None] * (0.1 + 0.01 * number)) + rng.normal(0, 0.1, (HOURS, 5))
    return table[rng.permutation(len(table))]


class Windows(Dataset):
    def __init__(self, table):
        self.table = np.sort(table, order=["hour"])
        self.names = np.unique(table["gauge"])
        self.per_gauge = HOURS - PAST - AHEAD
        if CURED:
            self.series = {name: self.of_gauge(name) for name in self.names}

    def of_gauge(self, name):
        rows = self.table["gauge"] == name  # cause: dataloader-too-few-workers or dataloader-slow-transform
        return self.table[rows]["reading"]

    def __len__(self):
        return len(self.names) * self.per_gauge

    def __getitem__(self, i):
        number, start = divmod(i, self.per_gauge)
        name = self.names[number]
        readings = self.series[name] if CURED else self.of_gauge(name)
        window = torch.from_numpy(readings[start : start + PAST + AHEAD].copy())
        return window[:PAST], window[PAST:, 0]


class Forecast(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.read = nn.GRU(5, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, AHEAD))

    def training_step(self, batch, batch_idx):
        past, ahead = batch
        _, last = self.read(past)
        loss = nn.functional.huber_loss(self.head(last[0]), ahead)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.step, self.ended = None, None, 0, None

    def on_train_batch_end(self, trainer, *args):
        self.step += 1
        self.ended = time.perf_counter()
        self.began = self.began or self.ended
        if self.warm is None and self.ended - self.began > 2:
            self.warm = self.step, self.ended
        if self.ended - self.began > SECONDS:
            trainer.should_stop = True


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    loader = DataLoader(Windows(archive()), batch_size=32, shuffle=True, drop_last=True)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, min_epochs=0, accelerator="cpu", logger=False, callbacks=[clock], log_every_n_steps=100,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Forecast(), loader)
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.step - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
