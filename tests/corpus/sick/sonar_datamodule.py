"""Trains a detector of wrecks in sonar images with Lightning; a data module fetches the images from an object store.

"nload shows a few percent of our bandwidth. The store says it is not busy either."
"""

import os
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Store:
    def get(self, key):
        time.sleep(0.005)  # the network
        return torch.full((1, 48, 48), (key % 97) / 97).numpy().tobytes()


class Sonar(Dataset):
    def __init__(self, keys):
        self.keys, self.store = keys, Store()

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        raw = bytearray(self.store.get(self.keys[index]))
        return torch.frombuffer(raw, dtype=torch.float32).view(1, 48, 48), index % 2


class SonarData(L.LightningDataModule):
    def setup(self, stage):
        self.train = Sonar(range(1_000_000))

    def train_dataloader(self):
        return DataLoader(  # cause: dataloader-too-few-workers
            self.train, batch_size=16, shuffle=False, num_workers=4 if CURED else 1, persistent_workers=True
        )


class Wrecks(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 2),
        )  # fmt: skip

    def on_train_start(self):
        self.began, self.warm = time.perf_counter(), None

    def on_train_batch_end(self, *rest):
        self.last = self.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last

    def training_step(self, batch, index):
        images, wrecks = batch
        return nn.functional.cross_entropy(self.net(images), wrecks)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=1_000_000)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    torch.set_num_threads(1)
    module = Wrecks()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, max_time={"seconds": SECONDS}, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, datamodule=SonarData())
    (first, at), (last, then) = module.warm, module.last
    print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)


if __name__ == "__main__":
    main()
