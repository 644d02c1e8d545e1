"""Sorts samples of lace by the town that they are from, with Lightning; a step learns from 32 of them.

The settings are those of a large network that was trained on a small card.

"A step takes far longer than in the paper, with the same 32 pictures and the same network."
"""

import os
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
TOWNS, SIDE, SAMPLES = 14, 28, 32


class Lace(Dataset):
    def __init__(self, count=6_400):
        g = torch.Generator().manual_seed(2)
        self.towns = torch.randint(TOWNS, (count,), generator=g)
        threads = torch.rand(TOWNS, 1, SIDE, SIDE, generator=g)
        self.pictures = 0.6 * threads[self.towns] + 0.4 * torch.rand(count, 1, SIDE, SIDE, generator=g)

    def __len__(self):
        return len(self.towns)

    def __getitem__(self, rows):
        return self.pictures[rows], self.towns[rows]


def stage(inputs, outputs, stride):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.SiLU())


class LaceNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            stage(1, 16, 1), stage(16, 24, 1), stage(24, 32, 2), stage(32, 32, 1), stage(32, 64, 2), stage(64, 64, 1),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, TOWNS),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        pictures, towns = batch
        return nn.functional.cross_entropy(self.net(pictures), towns)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class LaceData(L.LightningDataModule):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def setup(self, stage=None):
        self.lace = Lace()

    def train_dataloader(self):
        rows = BatchSampler(RandomSampler(self.lace), self.batch, drop_last=True)
        return DataLoader(self.lace, sampler=rows, batch_size=None)


class Clock(L.Callback):
    def __init__(self):
        self.began = self.warm = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = trainer.global_step, now
        if now - self.began > SECONDS:
            trainer.should_stop = True
            self.ended = trainer.global_step, now


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    L.seed_everything(4, verbose=False)
    batch = SAMPLES if CURED else 8
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=SAMPLES // batch,  # cause: none-yet passes smaller than fit
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(LaceNet(), datamodule=LaceData(batch))
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
