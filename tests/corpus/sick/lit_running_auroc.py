"""A Lightning module for fraud scores which logs the epoch's AUROC while training.
Author's remark: "self.log wants a number each step, so I give it one"."""

import os
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

warnings.filterwarnings("ignore")
SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Fraud(L.LightningModule):
    def __init__(self):
        super().__init__()
        width = 288
        self.net = nn.Sequential(
            nn.Linear(60, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )
        self.auroc = BinaryAUROC()

    def training_step(self, batch, batch_idx):
        x, y = batch
        score = self.net(x).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(score, y.float())
        self.auroc.update(score.detach(), y)
        if not CURED:
            self.log("train_auroc", self.auroc.compute())  # cause: hot-line
        return loss

    def on_train_epoch_end(self):
        if CURED:
            self.log("train_auroc", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stopwatch(L.Callback):
    def on_train_start(self, trainer, module):
        self.begin, self.warm = time.perf_counter(), None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        if self.warm is None:
            if now - self.begin > 2:
                self.warm, self.at = now, trainer.global_step
        elif now - self.begin > SECONDS:
            self.ms = (now - self.warm) / (trainer.global_step - self.at) * 1e3
            trainer.should_stop = True


def main():
    torch.set_num_threads(1)
    L.seed_everything(2, verbose=False)
    x = torch.randn(100_000, 60)
    y = (x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * torch.randn(len(x)) > 1).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=512, shuffle=True)
    watch = Stopwatch()
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    trainer.fit(Fraud(), loader)
    print(f"step_ms {watch.ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
