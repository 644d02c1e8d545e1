"""Trains a GRU keyword recogniser on feature sequences of various lengths with Lightning DDP.

Utterances are kept sorted by length so that a batch needs little padding.

"Two processes are hardly better than one. The GRU is small, its
gradient fits in one bucket, and still both ranks spend ages waiting for each other. Bad load balance?"
"""

# ranks: 2
import logging
import os
import random
import time
import warnings

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Utterances(Dataset):
    def __init__(self, n=1536, feats=24):
        g = torch.Generator().manual_seed(5)
        lens = (8 + 72 * torch.rand(n, generator=g) ** 2.5).long().sort().values
        self.items = []
        for ln in lens.tolist():
            k = int(torch.randint(0, 10, (1,), generator=g))
            x = torch.randn(ln, feats, generator=g)
            x[:, k] += 0.8
            self.items.append((x, k))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class ShardedBuckets(Sampler):
    """Batches of neighbours in length; each rank has its own share of the batches."""

    def __init__(self, n, batch):
        batches = [list(range(i, i + batch)) for i in range(0, n - batch + 1, batch)]
        per = len(batches) // WORLD
        self.mine = [batches[i * WORLD + RANK] for i in range(per)]
        self.epoch = 0

    def __len__(self):
        return len(self.mine)

    def __iter__(self):
        order = list(range(len(self.mine)))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return (self.mine[i] for i in order)


def collate(items):
    xs, ys = zip(*items, strict=False)
    return pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.tensor(ys)


class Recogniser(L.LightningModule):
    def __init__(self, feats=24, hid=96):
        super().__init__()
        self.gru = nn.GRU(feats, hid, batch_first=True)
        self.head = nn.Linear(hid, 10)

    def training_step(self, batch, _):
        x, n, y = batch
        h, _ = self.gru(x)
        mask = (torch.arange(x.shape[1])[None] < n[:, None]).unsqueeze(-1)
        logits = self.head((h * mask).sum(1) / n[:, None])
        loss = nn.functional.cross_entropy(logits, y)
        if not CURED or self.global_step % 100 == 0:
            hit = (logits.argmax(1) == y).float()
            scores = {f"recall/{k}": hit[y == k].sum() / (y == k).sum().clamp(min=1) for k in range(10)}
            self.log_dict({"loss": loss.detach(), **scores}, sync_dist=True)  # cause: small-collectives
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class Until(L.Callback):
    t0 = mark = None

    def on_train_batch_end(self, trainer, *args):
        now, step = time.perf_counter(), trainer.global_step
        if self.t0 is None:
            self.t0 = now
        if self.mark is None and now - self.t0 > 2:
            self.mark = now, step
        if step % 20 == 0:
            flag = torch.tensor([float(now - self.t0 > SECONDS)])
            dist.broadcast(flag, 0)
            if flag.item():
                trainer.should_stop = True
                self.ms = (now - self.mark[0]) / (step - self.mark[1]) * 1e3


if __name__ == "__main__":
    torch.manual_seed(0)
    data = Utterances()
    loader = DataLoader(data, batch_sampler=ShardedBuckets(len(data), 24), collate_fn=collate)
    until = Until()
    L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[until],
    ).fit(Recogniser(), loader)
    if RANK == 0:
        print(f"step_ms {until.ms:.3f}", flush=True)
