"""Guesses the next kind of music of listeners from the last eighty songs that they heard, with Lightning.

"The net above the songs is two layers of nothing. Why is it no faster when I halve them?"
"""

import os
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SONGS, HEARD, KINDS, WIDTH = 2_000, 80, 60, 96


class Histories(Dataset):
    """All in memory; a whole batch of rows is taken at once."""

    def __init__(self, listeners=40_000):
        g = torch.Generator().manual_seed(21)
        taste = torch.randint(KINDS, (listeners, 1), generator=g)
        near = taste * (SONGS // KINDS) + torch.randint(SONGS // KINDS, (listeners, HEARD), generator=g)
        other = torch.randint(SONGS, (listeners, HEARD), generator=g)
        self.heard = torch.where(torch.rand(listeners, HEARD, generator=g) < 0.2, near, other)
        self.next = taste[:, 0]

    def __len__(self):
        return len(self.next)

    def __getitem__(self, rows):
        return self.heard[rows], self.next[rows]


class Taste(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.songs = nn.EmbeddingBag(SONGS, WIDTH, mode="mean") if CURED else nn.Embedding(SONGS, WIDTH)
        self.guess = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, KINDS)
        )

    def profile(self, heard):
        if CURED:
            return self.songs(heard)
        return self.songs(heard).mean(1)  # cause: none-yet a mean of embeddings

    def training_step(self, batch, batch_idx):
        heard, kind = batch
        loss = nn.functional.cross_entropy(self.guess(self.profile(heard)), kind)
        if batch_idx % 100 == 0:
            self.log("loss", loss.detach(), prog_bar=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.step = None, None, 0

    def on_train_batch_end(self, trainer, *rest):
        self.step += 1
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = self.step, now
        if now - self.began > SECONDS:
            trainer.should_stop = True
            self.ended = now


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    data = Histories()
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 256, drop_last=True), batch_size=None)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(Taste(), loader)
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.step - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
