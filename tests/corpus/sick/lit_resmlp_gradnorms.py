"""Trains a deep residual MLP on tabular regression with Lightning and a CSV logger.

We had exploding gradients in an earlier run, therefore a callback now records
the gradient norm of each parameter.

"log_every_n_steps is 50, so logging can't be it, but the Python side of Lightning seems to
eat a large part of every step; a bare loop with the same network is much quicker."
"""

import logging
import os
import tempfile
import time
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
NORMS_EVERY = 100 if CURED else 1

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a = nn.Linear(d, 2 * d)
        self.b = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(self.norm(x))))


class TabularNet(pl.LightningModule):
    def __init__(self, n_in=40, d=96, depth=16):
        super().__init__()
        self.stem = nn.Linear(n_in, d)
        self.blocks = nn.Sequential(*[Block(d) for _ in range(depth)])
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.blocks(self.stem(x))).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.smooth_l1_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=5e-4)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20_000)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class GradNorms(Callback):
    """per-parameter 2-norms, like the old track_grad_norm"""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step % NORMS_EVERY:
            return
        norms = {f"grad/{name}": p.grad.norm(2) for name, p in module.named_parameters() if p.grad is not None}
        module.log_dict(norms)  # cause: logging-stall


class Timer(Callback):
    start = begin = None

    def on_train_batch_end(self, trainer, *_):
        t = time.perf_counter()
        if self.start is None:
            self.start = t
        if self.begin is None and t - self.start > 2.0:
            self.begin, self.first = t, trainer.global_step
        if t - self.start > SECONDS and not trainer.should_stop:
            trainer.should_stop = True
            print(f"step_ms {(t - self.begin) / (trainer.global_step - self.first) * 1e3:.3f}", flush=True)


def main():
    pl.seed_everything(7, verbose=False)
    x = torch.randn(40_000, 40)
    y = torch.sin(x[:, :5]).sum(1) + x[:, 5] * x[:, 6] + 0.1 * torch.randn(len(x))
    loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True, drop_last=True)
    with tempfile.TemporaryDirectory() as tmp:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=-1,
            logger=CSVLogger(tmp, flush_logs_every_n_steps=500),
            log_every_n_steps=50,
            gradient_clip_val=1.0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[GradNorms(), LearningRateMonitor("step"), Timer()],
        )
        trainer.fit(TabularNet(), loader)


if __name__ == "__main__":
    main()
