"""Tells the dances of bees apart with a transformer in Lightning, and watches the gradients for trouble.

"Since a run that blew up I log more. TensorBoard looks lovely now, but an epoch went from coffee to lunch. The values
are only numbers, and nothing is written but every fifty steps."
"""

import os
import tempfile
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
MOVES, LENGTH, DANCES, WIDTH = 6, 20, 5, 64
warnings.filterwarnings("ignore")


class Dances(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(MOVES, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.leave = nn.Linear(WIDTH, DANCES)

    def training_step(self, batch, _):
        moves, dance = batch
        loss = nn.functional.cross_entropy(self.leave(self.encoder(self.enter(moves) + self.place).mean(1)), dance)
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        if CURED and self.global_step % self.trainer.log_every_n_steps:
            return
        for name, weight in self.named_parameters():
            self.log(f"gradient/{name}", weight.grad.norm())  # cause: logging-stall

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(Callback):
    def __init__(self):
        self.began, self.mark, self.last = time.perf_counter(), None, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.last = trainer.global_step, now
        if self.mark is None and now - self.began > 2:
            self.mark = self.last
        if now - self.began > SECONDS:
            trainer.should_stop = True


def films(n=6400):
    g = torch.Generator().manual_seed(8)
    dance = torch.randint(DANCES, (n,), generator=g)
    beat = torch.arange(LENGTH)[:, None] * torch.linspace(0.3, 1.4, MOVES)
    moves = torch.sin(beat[None] * (1 + 0.2 * dance[:, None, None]))
    return TensorDataset(moves + 0.6 * torch.randn(n, LENGTH, MOVES, generator=g), dance)


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            logger=CSVLogger(folder),
            log_every_n_steps=50,
            callbacks=[clock],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Dances(), DataLoader(films(), batch_size=32, shuffle=True, drop_last=True))
    (n, then), (m, now) = clock.mark, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
