"""Trains a GPT-2 (2 layers) on log lines kept zlib-compressed in memory, with the transformers Trainer.

Batches should hold lines of like length, so the sampler draws a pool of candidates and
takes neighbours in length out of it.

"py-spy says the time is in my __getitem__ (zlib and the byte encoding), yet when I time a single batch of
items it takes next to nothing. Is the Trainer fetching things twice?"
"""

import os
import tempfile
import time
import zlib

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)

WORDS = "connect error retry user session cache disk node timeout GET POST ok 200 404 500 shard".split()


class LogLines(Dataset):
    def __init__(self, n=4000):
        rng = np.random.default_rng(0)
        self.blobs = []
        for n_words in rng.integers(4, 60, n):
            line = " ".join(WORDS[j] for j in rng.integers(0, len(WORDS), n_words))
            self.blobs.append(zlib.compress(line.encode()))

    def __len__(self):
        return len(self.blobs)

    def __getitem__(self, i):
        text = zlib.decompress(self.blobs[i]).decode()
        ids = [min(ord(c), 126) - 31 for c in text][:96]  # cause: hot-line
        return {"input_ids": ids}


class PooledLengthSampler(Sampler):
    def __init__(self, ds, batch, pool=40):
        self.ds, self.batch, self.pool = ds, batch, pool
        self.lengths = [len(ds[i]["input_ids"]) for i in range(len(ds))] if CURED else None
        self.gen = np.random.default_rng(1)

    def length(self, i):
        if self.lengths is not None:
            return self.lengths[i]
        return len(self.ds[i]["input_ids"])  # cause: hot-line

    def __len__(self):
        return len(self.ds) // self.batch * self.batch

    def __iter__(self):
        for _ in range(len(self) // self.batch):
            pool = self.gen.choice(len(self.ds), self.batch * self.pool, replace=False)
            pool = sorted(pool.tolist(), key=self.length)
            start = int(self.gen.integers(len(pool) - self.batch))
            yield from pool[start : start + self.batch]


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for k, r in enumerate(rows):
        ids[k, : len(r["input_ids"])] = torch.as_tensor(r["input_ids"])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class LengthTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return PooledLengthSampler(self.train_dataset, self.args.train_batch_size)


class Limit(TrainerCallback):
    t = None

    def on_step_end(self, args, state, control, **kw):
        now = time.perf_counter()
        if self.t is None:
            self.t, self.w = now, None
        if self.w is None and now > self.t + 2:
            self.w = now, state.global_step
        if now > self.t + SECONDS:
            control.should_training_stop = True
            self.out = (now - self.w[0]) / (state.global_step - self.w[1]) * 1000


torch.manual_seed(0)
net = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=96, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)
limit = Limit()
with tempfile.TemporaryDirectory() as d:
    a = TrainingArguments(
        d,
        use_cpu=True,
        max_steps=10**6,
        per_device_train_batch_size=8,
        learning_rate=6e-4,
        report_to="none",
        save_strategy="no",
        logging_steps=100,
        disable_tqdm=True,
    )
    tr = LengthTrainer(model=net, args=a, train_dataset=LogLines(), data_collator=collate, callbacks=[limit])
    tr.remove_callback(PrinterCallback)
    tr.train()
print(f"step_ms {limit.out:.3f}", flush=True)
