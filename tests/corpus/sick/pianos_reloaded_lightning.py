"""Names the piano that played a note from its spectrogram, in Lightning with a data module.

"Between two epochs nothing happens for about a second. No validation, no checkpoint, no logger. On the cluster with
its bigger folder of notes the pause is minutes long."
"""

import os
import time
import warnings

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
PIANOS, SAMPLES, WINDOW, HOP = 6, 16_000, 512, 64
warnings.filterwarnings("ignore")


class NotesModule(L.LightningDataModule):
    def __init__(self, notes=640, batch_size=16):
        super().__init__()
        self.notes, self.batch_size = notes, batch_size

    def setup(self, stage):
        rng = np.random.default_rng(3)
        self.pianos = rng.integers(0, PIANOS, self.notes)
        clock = np.arange(SAMPLES, dtype=np.float32)
        self.waves = 0.5 * rng.standard_normal((self.notes, SAMPLES), dtype=np.float32)
        for wave, piano in zip(self.waves, self.pianos, strict=False):
            wave += np.sin(0.05 * (1 + piano) * clock)

    def spectrogram(self, wave):
        frames = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP]
        power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW).astype(np.float32), axis=1))  # cause: hot-line
        power = np.log1p(power[:240, 1:257]).astype(np.float32)
        return power.reshape(60, 4, 128, 2).mean((1, 3))

    def train_dataloader(self):
        spectra = np.stack([self.spectrogram(wave) for wave in self.waves])  # cause: hot-line
        data = TensorDataset(torch.from_numpy(spectra)[:, None], torch.from_numpy(self.pianos))
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, drop_last=True)


class PianoNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
            nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, PIANOS),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        spectra, pianos = batch
        loss = nn.functional.cross_entropy(self.net(spectra), pianos)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


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
    L.seed_everything(1, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        reload_dataloaders_every_n_epochs=0 if CURED else 1,  # cause: hot-line
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PianoNet(), datamodule=NotesModule())
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.steps - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
