"""Learns features of satellite pictures of lagoons without labels (BYOL), with Lightning: two views, two networks.

"Each step has four forward passes, and a copy of the whole encoder is updated in each of them. Is that needed?"
"""

import copy
import os
import time

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
BATCH, SIDE = 24, 32


class Lagoons:
    """All pictures are in memory; a batch is an index, its views are cut from whole batches."""

    def __init__(self, count=1200):
        self.pictures = torch.rand(count, 4, SIDE + 8, SIDE + 8)

    def __iter__(self):
        while True:
            yield self.pictures[torch.randint(len(self.pictures), (BATCH,))]


def view(pictures):
    """One cut and one mirror for a batch, light and noise for each picture."""
    y, x = torch.randint(0, 9, (2,)).tolist()
    cut = pictures[:, :, y : y + SIDE, x : x + SIDE]
    if torch.rand(()) < 0.5:
        cut = cut.flip(3)
    return cut * (0.7 + 0.6 * torch.rand(len(cut), 4, 1, 1)) + 0.05 * torch.randn_like(cut)


def encoder(width=20, out=64):
    return nn.Sequential(
        nn.Conv2d(4, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2 * width, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, out),
    )  # fmt: skip


class Byol(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.online = encoder()
        self.predict = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.pairs = list(self.target.parameters()), list(self.online.parameters())

    def training_step(self, pictures, batch_idx):
        first, second = view(pictures), view(pictures)
        with torch.no_grad():
            goals = self.target(second), self.target(first)
        guesses = self.predict(self.online(first)), self.predict(self.online(second))
        loss = sum(2 - 2 * F.cosine_similarity(g, t).mean() for g, t in zip(guesses, goals, strict=True))
        self.log("loss", loss)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *unused):
        torch._foreach_lerp_(*self.pairs, 0.01)

    def configure_optimizers(self):
        return torch.optim.AdamW([*self.online.parameters(), *self.predict.parameters()], lr=1e-3)


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.step, self.ended = None, None, 0, None

    def on_train_batch_end(self, trainer, *args):
        self.step += 1
        self.ended = time.perf_counter()
        self.began = self.began or self.ended
        if self.warm is None and self.ended - self.began > 2:
            self.warm = self.step, self.ended
        if self.ended - self.began > SECONDS:
            trainer.should_stop = True


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        max_steps=-1, accelerator="cpu", logger=False, callbacks=[clock], log_every_n_steps=100,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Byol(), Lagoons())
    print(f"step_ms {1000 * (clock.ended - clock.warm[1]) / (clock.step - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
