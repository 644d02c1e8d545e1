# cause: frequent-validation no-line
"""Trains a classifier of intents with the Trainer of transformers, and looks at the accuracy every ten steps.

"I want a smooth curve, but the run now takes all day."
"""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Intents(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return {"input_ids": torch.full((48,), index % 500), "labels": index % 30}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 96)
        self.lstm = nn.LSTM(96, 128, batch_first=True)
        self.head = nn.Linear(128, 30)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.lstm(self.embed(input_ids))[0][:, -1])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Stop(TrainerCallback):
    warm = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.last = state.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = time.perf_counter() - self.began > SECONDS


torch.set_num_threads(1)
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=32, per_device_eval_batch_size=32,
    eval_strategy="steps", eval_steps=80 if CURED else 10,  # about a tenth of the time, as is advised
    use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
)  # fmt: skip
stop = Stop()
Trainer(Model(), arguments, train_dataset=Intents(10**6), eval_dataset=Intents(960), callbacks=[stop]).train()
(first, at), (last, then) = stop.warm, stop.last
print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
