"""Trains a residual network on windows of seismometer readings with Lightning and a CSV log.

"Utilisation is fine and the data are in memory, but I get half of the iterations per second I expect."
"""

import os
import tempfile
import time

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tremors(L.LightningModule):
    def __init__(self, width=128, depth=10):
        super().__init__()
        self.stem = nn.Linear(200, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def training_step(self, batch, batch_idx):
        windows, kinds = batch
        logits = self.head(self.blocks(self.stem(windows)))
        loss = nn.functional.cross_entropy(logits, kinds)
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        if not CURED or self.global_step % 200 == 0:
            norms = grad_norm(self, norm_type=2)  # cause: logging-stall or hot-line
            self.log_dict(norms)  # cause: logging-stall or hot-line

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-4)


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
    windows = torch.randn(20_480, 200)
    kinds = torch.randint(0, 3, (20_480,))
    loader = DataLoader(TensorDataset(windows, kinds), batch_size=128, shuffle=True, drop_last=True)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, min_epochs=0, accelerator="cpu", logger=CSVLogger(directory),
        log_every_n_steps=200 if CURED else 1,  # cause: logging-stall or hot-line
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
        default_root_dir=directory,
    )  # fmt: skip
    trainer.fit(Tremors(), loader)
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.step - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
