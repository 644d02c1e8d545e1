"""Trains a 1-D CNN on ECG snippets streamed from compressed shards with Lightning.

A streaming dataset; an "epoch" is a short round so that the schedulers and callbacks
that work per epoch act often.

"CPU usage of the main process goes to zero regularly, as though it waited for something, and
more workers make it worse instead of better."
"""

import glob
import itertools
import logging
import os
import tempfile
import time
import warnings

import lightning as L
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)

ROUND = 40  # batches per worker round
BATCH = 32
T = 500


def write_shards(folder, n=4, per=600):
    rng = np.random.default_rng(0)
    t = np.linspace(0, 10, T, dtype=np.float32)
    for s in range(n):
        label = rng.integers(0, 4, per)
        freq = 1 + 0.5 * label[:, None] + 0.1 * rng.standard_normal((per, 1))
        sig = np.sin(2 * np.pi * freq * t) ** 9 + 0.3 * rng.standard_normal((per, T))
        np.savez_compressed(f"{folder}/shard{s}.npz", sig=sig.astype(np.float32), label=label)


class ECGStream(IterableDataset):
    def __init__(self, folder):
        self.files = sorted(glob.glob(f"{folder}/*.npz"))
        self.cache = None

    def _open(self, wid, n):
        sig, lab = [], []
        for f in self.files[wid::n]:
            with np.load(f) as z:
                sig.append(z["sig"])
                lab.append(z["label"])
        self.cache = np.concatenate(sig), np.concatenate(lab)
        self.rng = np.random.default_rng(int(time.time_ns() % 2**32) + wid)

    def __iter__(self):
        info = get_worker_info()
        wid, n = (info.id, info.num_workers) if info else (0, 1)
        if self.cache is None:
            self._open(wid, n)
        sig, lab = self.cache
        for _ in range(ROUND // n * BATCH):
            i = self.rng.integers(len(lab))
            x = sig[i]
            x = (x - x.mean()) / (x.std() + 1e-6)
            yield torch.from_numpy(np.roll(x, self.rng.integers(T)))[None], int(lab[i])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        ch = [1, 16, 32, 48]
        layers = []
        for a, b in itertools.pairwise(ch):
            layers += [nn.Conv1d(a, b, 7, stride=2, padding=3), nn.BatchNorm1d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(ch[-1], 4))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.body(x), y)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.995)]


class Deadline(L.Callback):
    def __init__(self):
        self.t0 = self.t1 = None

    def on_train_batch_end(self, trainer, *a):
        now = time.monotonic()
        self.t0 = self.t0 or now
        if self.t1 is None and now - self.t0 > 2:
            self.t1, self.n1 = now, trainer.global_step
        if now - self.t0 > SECONDS:
            trainer.should_stop = True
            self.result = (now - self.t1) / (trainer.global_step - self.n1) * 1000


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as d:
        write_shards(d)
        dl = DataLoader(  # cause: dataloader-workers-restarted
            ECGStream(d),
            batch_size=BATCH,
            num_workers=2,
            persistent_workers=CURED,
        )
        end = Deadline()
        L.Trainer(
            accelerator="cpu",
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[end],
        ).fit(Net(), dl)
        print(f"step_ms {end.result:.3f}", flush=True)
