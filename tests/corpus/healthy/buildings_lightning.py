"""Trains a segmentation of buildings with Lightning; epochs are short, and the workers stay.

"I have read that many short epochs are slow."
"""

import os
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))


class Roofs(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        image = torch.rand(3, 32, 32, generator=draw)
        return image, (image.mean(0, keepdim=True) > 0.5).float()


class Segmenter(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 1)
        )

    def training_step(self, batch, index):
        return nn.functional.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Clock(L.Callback):
    warm = None

    def on_train_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, module, *rest):
        self.last = trainer.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last


if __name__ == "__main__":
    torch.set_num_threads(1)
    loader = DataLoader(Roofs(), batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, max_time={"seconds": SECONDS}, accelerator="cpu", logger=False, callbacks=[clock],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Segmenter(), loader)
    (first, at), (last, then) = clock.warm, clock.last
    print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
