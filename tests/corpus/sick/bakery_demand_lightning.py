"""Next-day demand of bread and pastry for a chain of bakeries, from four weeks of hourly till counts.

Note of the owner: "An epoch is only a few batches long, and sales keep coming in during the day,
so I let Lightning ask the data module again at each epoch; then the newest rows are always in."
"""

import os
import time

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", 22))
CURED = os.environ.get("CURED") == "1"

HOURS = 24 * 28
PRODUCTS = 12


class TillCounts(Dataset):
    def __init__(self, counts, length):
        self.counts = counts
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        shop = i % self.counts.shape[0]
        day = (i * 37) % (self.counts.shape[1] // 24 - 30)
        window = self.counts[shop, day * 24 : day * 24 + HOURS]
        target = self.counts[shop, day * 24 + HOURS : day * 24 + HOURS + 24].sum(0)
        window = np.log1p(window) - np.log1p(window).mean(0, keepdims=True)
        return torch.from_numpy(window.T.astype(np.float32)), torch.from_numpy(np.log1p(target).astype(np.float32))


class TillData(L.LightningDataModule):
    def setup(self, stage=None):
        rng = np.random.default_rng(4)
        hours = np.arange(24 * 200)
        daily = 8 + 6 * np.sin((hours % 24 - 6) / 24 * 2 * np.pi)
        weekly = 1 + 0.3 * (hours // 24 % 7 >= 5)
        base = rng.gamma(2.0, 1.0, size=(60, 1, PRODUCTS))
        self.counts = rng.poisson(np.clip(daily * weekly, 0, None)[None, :, None] * base)

    def train_dataloader(self):
        data = TillCounts(self.counts, length=10 * 32)
        return DataLoader(  # cause: dataloader-workers-restarted
            data, batch_size=32, shuffle=True, num_workers=1, persistent_workers=True
        )


class DemandNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(PRODUCTS, 32, 7, stride=2, padding=3),
            nn.GELU(),
            nn.Conv1d(32, 48, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(48, 64, 5, stride=2, padding=2),
            nn.GELU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(256, PRODUCTS),
        )

    def training_step(self, batch, batch_idx):
        window, target = batch
        loss = nn.functional.smooth_l1_loss(self.body(window), target)
        if batch_idx == 0:
            self.log("loss", loss.detach(), on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class ClosingTime(L.Callback):
    """Ends the fit after SECONDS and keeps the time of each batch end."""

    def __init__(self):
        self.ends = []

    def on_train_start(self, trainer, module):
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.ends.append(now)
        if now - self.start > SECONDS:
            trainer.should_stop = True


def main():
    torch.set_num_threads(1)
    L.seed_everything(11, verbose=False)
    closing = ClosingTime()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[closing],
        reload_dataloaders_every_n_epochs=0 if CURED else 1,
    )
    trainer.fit(DemandNet(), datamodule=TillData())
    ends = closing.ends[len(closing.ends) // 10 :]
    print(
        f"epochs={trainer.current_epoch} steps={len(closing.ends)} loss={float(trainer.callback_metrics['loss']):.4f}"
    )
    print(f"step_ms {(ends[-1] - ends[0]) / (len(ends) - 1) * 1000:.3f}")


if __name__ == "__main__":
    main()
