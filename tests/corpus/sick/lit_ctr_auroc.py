"""Trains a click-through model (embedding bag + MLP) with Lightning on synthetic ad impressions.

The model has a handful of categorical columns and a few dense ones, and we follow
AUROC and average precision while it trains.

"At the beginning of an epoch it flies and then it gets slower and slower until the next epoch
starts. I suspected a memory leak, but memory is flat."
"""

import logging
import os
import time
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

N_ROWS, N_CAT, N_DENSE, VOCAB = 60_000, 12, 8, 5000
BATCH = 256


def impressions(seed=0):
    g = torch.Generator().manual_seed(seed)
    cats = (torch.rand(N_ROWS, N_CAT, generator=g) ** 3 * VOCAB).long()
    dense = torch.randn(N_ROWS, N_DENSE, generator=g)
    pull = torch.randn(VOCAB, generator=g)[cats].mean(1) * 2 + dense[:, 0] * dense[:, 1]
    clicks = (torch.rand(N_ROWS, generator=g) < torch.sigmoid(pull - 1.5)).float()
    return TensorDataset(cats, dense, clicks)


class CTR(L.LightningModule):
    def __init__(self, dim=16, hidden=384):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim * N_CAT + N_DENSE, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.auroc = BinaryAUROC()
        self.ap = BinaryAveragePrecision()

    def forward(self, cats, dense):
        return self.mlp(torch.cat([self.emb(cats).flatten(1), dense], 1)).squeeze(1)

    def training_step(self, batch, idx):
        cats, dense, y = batch
        logit = self(cats, dense)
        loss = F.binary_cross_entropy_with_logits(logit, y)
        p = logit.detach().sigmoid()
        self.auroc.update(p, y.long())
        self.ap.update(p, y.long())
        if not CURED or idx % 100 == 99:
            self.log("train/auroc", self.auroc.compute())  # cause: hot-line or logging-stall
            self.log("train/ap", self.ap.compute())
        self.log("train/loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.auroc.reset()
        self.ap.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class StopWatch(L.Callback):
    def on_train_start(self, trainer, pl_module):
        self.t0 = time.perf_counter()
        self.mark = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.perf_counter()
        if self.mark is None and now - self.t0 >= 2:
            self.mark = (now, trainer.global_step)
        if now - self.t0 >= SECONDS:
            trainer.should_stop = True
            self.ms = 1000 * (now - self.mark[0]) / (trainer.global_step - self.mark[1])


if __name__ == "__main__":
    L.seed_everything(1, verbose=False)
    watch = StopWatch()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    trainer.fit(CTR(), DataLoader(impressions(), batch_size=BATCH, shuffle=True, drop_last=True))
    print(f"step_ms {watch.ms:.3f}", flush=True)
