"""Trains a classifier of traffic signs with the Trainer of transformers; it evaluates and saves now and then.

"What does the Trainer cost me?"
"""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))


class Signs(Dataset):
    def __init__(self, rows):
        self.rows = rows
        self.pixels = torch.rand(256, 3, 24, 24)

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return {"pixels": self.pixels[index % 256], "labels": index % 43}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(32 * 400, 43)

    def forward(self, pixels, labels=None):
        logits = self.head(self.body(pixels))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Timer(TrainerCallback):
    warm = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.last = state.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last
        control.should_training_stop = self.last[1] - self.began > SECONDS


torch.set_num_threads(1)
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=32, use_cpu=True, report_to=[],
    eval_strategy="steps", eval_steps=150, save_strategy="steps", save_steps=150, save_total_limit=1,
    logging_steps=50, disable_tqdm=True,
)  # fmt: skip
timer = Timer()
Trainer(Net(), arguments, train_dataset=Signs(10**6), eval_dataset=Signs(320), callbacks=[timer]).train()
(first, at), (last, then) = timer.warm, timer.last
print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
