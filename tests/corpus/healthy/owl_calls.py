"""Names owls by their calls, with Lightning; accuracy and confusion are followed while it trains.

The spectrograms are computed from the sound in the training step, with a new shift and new noise each time,
and a checkpoint is written now and then.

"I have two metrics and three log calls in the training step, no loader workers, and a checkpoint callback."
"""

import os
import tempfile
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

SECONDS = float(os.environ.get("SECONDS", "22"))
OWLS, CALLS, SOUND, BATCH = 9, 1600, 4096, 24


class Calls(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.owls = torch.randint(OWLS, (CALLS,), generator=g)
        t = torch.arange(SOUND) / SOUND
        pitch = 150 + 60 * self.owls[:, None] + 20 * torch.randn(CALLS, 1, generator=g)
        wobble = 2 + self.owls[:, None] % 3
        self.sounds = torch.sin(6.283 * pitch * t + 4 * torch.sin(6.283 * wobble * t))

    def __len__(self):
        return CALLS

    def __getitem__(self, i):
        return self.sounds[i], self.owls[i]


class OwlNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(256), persistent=False)
        layers, channels = [], 1
        for width in (16, 32, 48):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48 * 4, OWLS))
        self.accuracy = MulticlassAccuracy(OWLS, validate_args=False)
        self.confusion = MulticlassConfusionMatrix(OWLS, validate_args=False)

    def spectrogram(self, sounds):
        sounds = sounds.roll(int(torch.randint(SOUND, ())), 1) + 0.5 * torch.randn_like(sounds)
        spectrum = torch.stft(sounds, 256, 64, window=self.window, return_complex=True)
        return spectrum[:, :64].abs().log1p()[:, None]

    def training_step(self, batch, batch_idx):
        sounds, owls = batch
        logits = self.net(self.spectrogram(sounds))
        loss = nn.functional.cross_entropy(logits, owls)
        self.accuracy.update(logits.detach(), owls)
        self.confusion.update(logits.detach(), owls)
        self.log("loss", loss)
        self.log("loss_epoch", loss.detach(), on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        table = self.confusion.compute()
        worst = (table.diagonal() / table.sum(1).clamp_min(1)).argmin().item()
        print(f"epoch {self.current_epoch} hardest owl {worst}")
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Clock(L.Callback):
    began = warm = ended = None

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
    loader = DataLoader(Calls(), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
            callbacks=[clock, ModelCheckpoint(folder, every_n_train_steps=300, save_top_k=1)],
        )  # fmt: skip
        trainer.fit(OwlNet(), loader)
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
