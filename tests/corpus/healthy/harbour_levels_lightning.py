"""Forecasts water levels in a harbour with a dilated CNN in Lightning, with averaged weights and watched gradients.

After each step a callback moves the averaged weights, and before each step the norm of all gradients is logged.

"Is it wise to touch every weight of the network three times per step from Python?"
"""

import os
import time

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SECONDS = float(os.environ.get("SECONDS", "22"))
GAUGES, PAST, AHEAD, WIDTH = 4, 168, 12, 64


class Levels(Dataset):
    """windows of hourly levels; takes the indices of a whole batch"""

    def __init__(self, hours=12_000, seed=8):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours)[:, None]
        tide = torch.sin(t * 0.506 + torch.arange(GAUGES)) + 0.3 * torch.sin(t * 0.0177)
        level = tide + 0.1 * torch.randn(hours, GAUGES, generator=g)
        self.windows = level.unfold(0, PAST + AHEAD, 1)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, rows):
        window = self.windows[rows]
        return window[..., :PAST], window[..., PAST:]


class Forecaster(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv1d(GAUGES, WIDTH, 3, padding=1), nn.ReLU()]
        for dilation in (1, 2, 4, 8):
            layers += [nn.Conv1d(WIDTH, WIDTH, 3, padding=dilation, dilation=dilation), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, GAUGES * AHEAD)

    def training_step(self, batch, batch_idx):
        past, ahead = batch
        guess = self.head(self.body(past).mean(2)).view_as(ahead)
        loss = nn.functional.smooth_l1_loss(guess, ahead)
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log("gradients", grad_norm(self, 2)["grad_2.0_norm_total"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Averaged(L.Callback):
    def __init__(self, decay=0.999):
        self.decay, self.weights = decay, None

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *args):
        current = list(module.parameters())
        if self.weights is None:
            self.weights = [p.clone() for p in current]
        for kept, p in zip(self.weights, current, strict=False):
            kept.lerp_(p, 1 - self.decay)


class Clock(L.Callback):
    def __init__(self):
        self.began, self.warm, self.step, self.now = None, None, 0, None

    def on_train_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, *args):
        self.step += 1
        self.now = time.perf_counter()
        if self.warm is None and self.now - self.began > 2:
            self.warm = self.step, self.now
        if self.now - self.began > SECONDS:
            trainer.should_stop = True


def main():
    L.seed_everything(5, verbose=False)
    levels = Levels()
    loader = DataLoader(levels, sampler=BatchSampler(RandomSampler(levels), 64, drop_last=True), batch_size=None)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, min_epochs=0, accelerator="cpu", callbacks=[Averaged(), clock], logger=False,
        gradient_clip_val=1.0, log_every_n_steps=50, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Forecaster(), loader)
    print(f"step_ms {1000 * (clock.now - clock.warm[1]) / (clock.step - clock.warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
