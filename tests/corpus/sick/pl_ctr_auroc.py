"""Predicts clicks from categorical features with Lightning and shows the AUROC of the running epoch.

Two-layer net on summed embeddings, in the manner of DeepFM without the FM part.

"The iterations per second drop during every epoch and recover when the next one starts. Batches are all of the
same size and nothing is validated."
"""

import logging
import os
import tempfile
import time
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

FIELDS, CARDINALITY, DIM = 16, 500, 16

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Clicks(L.LightningDataModule):
    def __init__(self, rows=80_000, batch_size=256):
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def setup(self, stage):
        gen = torch.Generator().manual_seed(4)
        x = torch.randint(CARDINALITY, (self.rows, FIELDS), generator=gen)
        effect = torch.randn(FIELDS, CARDINALITY, generator=gen) * 0.5
        score = effect[torch.arange(FIELDS), x].sum(1) - 1
        y = torch.bernoulli(score.sigmoid(), generator=gen)
        self.data = TensorDataset(x + CARDINALITY * torch.arange(FIELDS), y)

    def train_dataloader(self):
        order = torch.utils.data.BatchSampler(
            torch.utils.data.RandomSampler(self.data), batch_size=self.batch_size, drop_last=True
        )
        return DataLoader(self.data, sampler=order, batch_size=None)


class ClickModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(FIELDS * CARDINALITY, DIM)
        self.mlp = nn.Sequential(
            nn.Linear(FIELDS * DIM, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        self.auroc = BinaryAUROC()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logit = self.mlp(self.table(x).flatten(1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logit, y)
        self.auroc.update(logit.detach().sigmoid(), y.int())
        self.log("loss", loss, prog_bar=True)
        if not CURED:
            self.log("auroc", self.auroc.compute(), prog_bar=True)  # cause: hot-line
        return loss

    def on_train_epoch_end(self):
        value = self.auroc.compute()
        self.log("epoch_auroc", value)
        print(f"epoch {self.current_epoch}: auroc {value:.4f}")
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class StopWatch(L.Callback):
    def on_train_start(self, trainer, module):
        self.begin, self.mark = time.perf_counter(), None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        if self.mark is None and now - self.begin > 2:
            self.mark = now, trainer.global_step
        if now - self.begin > SECONDS and not trainer.should_stop:
            self.step_ms = 1000 * (now - self.mark[0]) / (trainer.global_step - self.mark[1])
            trainer.should_stop = True


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    watch = StopWatch()
    with tempfile.TemporaryDirectory() as root:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root,
            callbacks=[watch],
        )
        trainer.fit(ClickModel(), datamodule=Clicks())
    print(f"step_ms {watch.step_ms:.3f}", flush=True)
