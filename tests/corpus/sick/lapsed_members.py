"""Predicts which members of a sports club will leave in the next year, with Lightning.

Each member has numbers and a few categories, a residual MLP gives the odds. The area under the
curve is what the board looks at, so it is logged.

"At the start of each epoch it is quick, by the end of the epoch it crawls, and then it is quick again."
"""

import os
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchmetrics.classification import BinaryAUROC

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
MEMBERS, NUMBERS, KINDS = 115_200, 24, (12, 30, 7, 50)


class Members(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(6)
        self.numbers = torch.randn(MEMBERS, NUMBERS, generator=g)
        self.kinds = torch.stack([torch.randint(k, (MEMBERS,), generator=g) for k in KINDS], 1)
        odds = self.numbers[:, 0] * self.numbers[:, 1] + torch.sin(self.kinds[:, 3] * 0.7) - 1
        self.left = (torch.rand(MEMBERS, generator=g) < odds.sigmoid()).long()

    def __len__(self):
        return MEMBERS

    def __getitem__(self, rows):
        return self.numbers[rows], self.kinds[rows], self.left[rows]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.inner(self.norm(x))


class LapseModel(L.LightningModule):
    def __init__(self, width=96):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(k, 8) for k in KINDS)
        self.enter = nn.Linear(NUMBERS + 8 * len(KINDS), width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(3)])
        self.exit = nn.Linear(width, 1)
        self.auroc = BinaryAUROC()

    def forward(self, numbers, kinds):
        embedded = [table(kinds[:, i]) for i, table in enumerate(self.tables)]
        return self.exit(self.blocks(self.enter(torch.cat([numbers, *embedded], 1))))[:, 0]

    def training_step(self, batch, batch_idx):
        numbers, kinds, left = batch
        logits = self(numbers, kinds)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, left.float())
        self.auroc.update(logits.detach(), left)
        if not CURED:
            self.log("train_auc", self.auroc.compute())  # cause: hot-line
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_auc", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Clock(L.Callback):
    began = warm = ended = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = trainer.global_step, now
        if now - self.began > SECONDS:
            trainer.should_stop = True
            self.ended = trainer.global_step, now


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    L.seed_everything(4, verbose=False)
    members = Members()
    rows = BatchSampler(RandomSampler(members), 384, drop_last=True)
    clock = Clock()
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(LapseModel(), DataLoader(members, sampler=rows, batch_size=None))
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
