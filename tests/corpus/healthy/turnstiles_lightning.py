"""Predicts the passengers of a station from its turnstile counts with Lightning; time stamps are parsed as they come.

"The dataset parses a date from text for every sample, in the main process, and validation and a checkpoint come with
every epoch. Should I rewrite all this before the long run?"
"""

import os
import tempfile
import time
import warnings
from datetime import datetime, timedelta

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
GATES, HOURS, BATCH = 16, 72, 32
warnings.filterwarnings("ignore")


class Turnstiles(Dataset):
    def __init__(self, samples, seed):
        rng = np.random.default_rng(seed)
        self.samples = samples
        self.counts = rng.random((samples + HOURS + 1, GATES), dtype=np.float32)
        start = datetime(2021, 3, 1)
        self.stamps = [(start + timedelta(hours=h)).strftime("%Y-%m-%d %H:%M") for h in range(len(self.counts))]

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        until = index + HOURS
        now = datetime.strptime(self.stamps[until], "%Y-%m-%d %H:%M")
        calendar = torch.tensor([now.hour / 24, now.weekday() / 7, now.month / 12])
        return torch.from_numpy(self.counts[index:until]), calendar, float(self.counts[until].sum())


class Station(L.LightningModule):
    def __init__(self, width=96):
        super().__init__()
        self.enter = nn.Linear(GATES, width)
        self.place = nn.Parameter(0.02 * torch.randn(HOURS, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Sequential(nn.Linear(width + 3, 64), nn.ReLU(), nn.Linear(64, 1))

    def error(self, batch):
        counts, calendar, passengers = batch
        state = self.encoder(self.enter(counts) + self.place).mean(1)
        predicted = self.leave(torch.cat([state, calendar], dim=1)).squeeze(1)
        return nn.functional.l1_loss(predicted, passengers.float())

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("held", self.error(batch), batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-4)


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.steps = None, None, 0

    def on_train_batch_end(self, trainer, *rest):
        self.steps += 1
        self.ended = time.perf_counter()
        self.began = self.began or self.ended
        if self.warm is None and self.ended - self.began > 2:
            self.warm = self.steps, self.ended
        if self.ended - self.began > SECONDS:
            trainer.should_stop = True


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            logger=False,
            callbacks=[clock, ModelCheckpoint(folder, monitor="held", save_last=True)],
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        train = DataLoader(Turnstiles(4_800, seed=1), batch_size=BATCH, shuffle=True, drop_last=True)
        held = DataLoader(Turnstiles(128, seed=2), batch_size=64)
        trainer.fit(Station(), train, held)
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.steps - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
