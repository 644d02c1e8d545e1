"""Recognises lighthouses by their light's rhythm with Lightning; four batches are accumulated for each step.

"The progress is in jumps: the weights move only on every fourth batch, and now and then it validates."
"""

import os
import tempfile
import time

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)


class Rhythms(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 32, 9, stride=2), nn.ReLU(), nn.Conv1d(32, 64, 9, stride=2), nn.ReLU(), nn.Conv1d(64, 64, 5),
            nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 30),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        lights, names = batch
        loss = nn.functional.cross_entropy(self.net(lights), names)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        lights, names = batch
        self.log("accuracy", (self.net(lights).argmax(1) == names).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=1_000_000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.step = None, None, 0

    def on_train_batch_end(self, trainer, *args):
        self.step += 1
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = self.step, now
        if now - self.began > SECONDS:
            trainer.should_stop = True
            self.ended = now


def main():
    directory = tempfile.mkdtemp()
    lights, names = torch.randn(8_192, 1, 400), torch.randint(0, 30, (8_192,))
    training = DataLoader(TensorDataset(lights, names), batch_size=32, shuffle=True, drop_last=True)
    validation = DataLoader(TensorDataset(lights[:256], names[:256]), batch_size=128)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, min_epochs=0, accelerator="cpu", logger=CSVLogger(directory), log_every_n_steps=50,
        accumulate_grad_batches=4, gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[clock], default_root_dir=directory,
    )  # fmt: skip
    trainer.fit(Rhythms(), training, validation)
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.step - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
