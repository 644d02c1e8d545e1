"""Tells pastries apart from pictures with Lightning; counts hits in training, logs, validates and saves now and then.

"I log in each step, count in each step, and there is a checkpoint callback. How much of my time is for that?"
"""

import os
import tempfile
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchmetrics import MeanMetric

SECONDS = float(os.environ.get("SECONDS", "22"))
KINDS, SIDE = 10, 40


class Pastries(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        looks = torch.rand(KINDS, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        self.kinds = torch.randint(KINDS, (count,), generator=g)
        self.pictures = 0.5 * looks[self.kinds] + 0.5 * torch.rand(count, 3, SIDE, SIDE, generator=g)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, rows):
        return self.pictures[rows], self.kinds[rows]


class Baker(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 24, 5, 2, 2), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, 1, 1), nn.BatchNorm2d(48),
            nn.ReLU(), nn.Conv2d(48, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(256, KINDS),
        )  # fmt: skip
        self.hits = MeanMetric()

    def training_step(self, batch, batch_idx):
        pictures, kinds = batch
        logits = self.net(pictures)
        loss = nn.functional.cross_entropy(logits, kinds)
        self.hits.update((logits.detach().argmax(1) == kinds).float())
        self.log("loss", loss)
        self.log("hits", self.hits, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pictures, kinds = batch
        self.log("held", nn.functional.cross_entropy(self.net(pictures), kinds), batch_size=len(kinds))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20_000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.step = None, None, 0

    def on_train_batch_end(self, trainer, *rest):
        self.step += 1
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = self.step, now
        if now - self.began > SECONDS:
            trainer.should_stop = True
            self.ended = now


def loader(data, size, drawn=True):
    rows = RandomSampler(data) if drawn else range(len(data))
    return DataLoader(data, sampler=BatchSampler(rows, size, drop_last=drawn), batch_size=None)


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    folder = tempfile.mkdtemp()
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, logger=CSVLogger(folder), log_every_n_steps=50,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[clock, LearningRateMonitor("step"), ModelCheckpoint(folder, monitor="held", save_last=True)],
    )  # fmt: skip
    trainer.fit(Baker(), loader(Pastries(6_400, 1), 20), loader(Pastries(160, 2), 80, drawn=False))
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.step - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
