"""Classifies herbalists' notes with Lightning, on top of word vectors that were trained elsewhere.

A checkpoint is kept after each (short) epoch; the notes come in faster than one would like to lose them.

"My classifier has a few thousand weights, and yet the progress bar halts for a moment after each epoch. I have no
validation loop. Is it the loader?"
"""

import os
import tempfile
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, WIDTH, KINDS, LENGTH = 100_000, 128, 12, 20
warnings.filterwarnings("ignore")


def word_vectors(seed=1):
    """Stands for a file of vectors: one for each word."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(WORDS, WIDTH, generator=g)


class Notes(L.LightningModule):
    def __init__(self, vectors, kinds=KINDS, width=96, rate=2e-3):
        super().__init__()
        if CURED:
            self.save_hyperparameters(ignore=["vectors"], logger=False)
        else:
            self.save_hyperparameters(logger=False)  # cause: checkpoint-stall no-line
        self.vectors = [vectors]  # in a list: not among the weights
        self.read = nn.GRU(WIDTH, width, batch_first=True)
        self.kind = nn.Linear(width, kinds)

    def forward(self, words):
        return self.kind(self.read(nn.functional.embedding(words, self.vectors[0]))[0].amax(1))

    def training_step(self, batch, _):
        words, kind = batch
        loss = nn.functional.cross_entropy(self(words), kind)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.rate)


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


def notes(n=400):
    g = torch.Generator().manual_seed(5)
    kind = torch.randint(KINDS, (n,), generator=g)
    words = torch.randint(WORDS, (n, LENGTH), generator=g)
    tell = torch.rand(n, LENGTH, generator=g) < 0.3
    words[tell] = (kind[:, None] * 7 + words % 7)[tell]
    return TensorDataset(words, kind)


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            logger=False,
            callbacks=[clock, ModelCheckpoint(folder)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Notes(word_vectors()), DataLoader(notes(), batch_size=16, shuffle=True))
        print(f"loss {trainer.callback_metrics['loss'].item():.4f}", flush=True)
    (n, then), (m, now) = clock.mark, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
