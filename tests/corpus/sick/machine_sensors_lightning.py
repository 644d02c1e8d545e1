"""Trains an autoencoder on vibration windows of a machine with Lightning; the set is small and an epoch is short.

"Between two epochs everything stops for a moment."
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


class Windows(Dataset):
    def __init__(self):
        self.signal = np.random.default_rng(3).standard_normal(200_000).astype(np.float32)

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.from_numpy(self.signal[index * 300 : index * 300 + 512].copy())


class Autoencoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 32), nn.Linear(32, 512))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


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
    loader = DataLoader(  # cause: dataloader-workers-restarted
        Windows(), batch_size=32, shuffle=True, num_workers=2, persistent_workers=CURED
    )
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, max_time={"seconds": SECONDS}, accelerator="cpu", logger=False, callbacks=[clock],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Autoencoder(), loader)
    (first, at), (last, then) = clock.warm, clock.last
    print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
