"""Loan default risk from tabular records, residual MLP in Lightning.

"The longer an epoch runs the slower the progress bar gets, and at the next epoch
it is quick again. I'm sure it is memory fragmentation, because the model and the
batch size are the same all the time."
"""

import os
import time
import warnings
from datetime import timedelta

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchmetrics.classification import BinaryAUROC

warnings.filterwarnings("ignore")
SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
COLUMNS = 60


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class RiskModel(L.LightningModule):
    def __init__(self, width=128, depth=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(COLUMNS, width), *[Block(width) for _ in range(depth)], nn.Linear(width, 1))
        self.auroc = BinaryAUROC()

    def training_step(self, batch, batch_idx):
        x, y = batch
        score = self.net(x).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(score, y)
        self.auroc.update(score.detach(), y.long())
        self.log("loss", loss)
        if not CURED:
            self.log("auroc_so_far", self.auroc.compute())  # cause: hot-line
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch}: AUROC {self.auroc.compute():.4f}")
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    def on_train_start(self, trainer, pl_module):
        self.start, self.mark = time.time(), None

    def on_train_batch_end(self, trainer, *_):
        if self.mark is None and time.time() - self.start > 2:
            self.mark = (time.time(), trainer.global_step)

    def on_train_end(self, trainer, pl_module):
        t, n = self.mark
        print(f"step_ms {(time.time() - t) / (trainer.global_step - n) * 1000:.3f}")


def loans(n=102_400):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, COLUMNS, generator=g)
    w = torch.randn(COLUMNS, generator=g)
    risk = x @ w / 6 + (x[:, 0] * x[:, 1]) - 1.5
    return TensorDataset(x, (torch.rand(n, generator=g) < risk.sigmoid()).float())


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    data = loans()
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 512, drop_last=True), batch_size=None)
    trainer = L.Trainer(
        max_epochs=-1,
        max_time=timedelta(seconds=SECONDS),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
    )
    trainer.fit(RiskModel(), loader)
