"""Trains a small transformer on product reviews with the Trainer of transformers; the collator tokenizes.

"nvtop shows gaps between the steps. Somebody said that the fast tokenizer is fast enough to be called anywhere."
"""

import os
import random
import tempfile
import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
chance = random.Random(1)
WORDS = ["".join(chance.choices("aeioubcdlmnprst", k=chance.randint(2, 11))) for _ in range(4000)]


class Reviews(Dataset):
    def __init__(self):
        self.texts = [" ".join(chance.choices(WORDS, k=900)) for _ in range(2000)]
        self.ids = [torch.tensor(tokenizer.encode(text).ids[:128]) for text in self.texts] if CURED else []

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if CURED:
            return {"ids": self.ids[index % 2000], "label": index % 2}
        return {"text": self.texts[index % 2000], "label": index % 2}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3000, 128)
        self.encoder = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, input_ids, labels):
        logits = self.head(self.encoder(self.embed(input_ids)).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Clock(TrainerCallback):
    warm = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.last = state.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last
        control.should_training_stop = self.last[1] - self.began > SECONDS


torch.set_num_threads(1)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=3000, show_progress=False))


def collate(rows):  # cause: dataloader-slow-transform or dataloader-too-few-workers no-line
    if CURED:
        ids = torch.stack([row["ids"] for row in rows])
    else:
        ids = torch.tensor([tokenizer.encode(row["text"]).ids[:128] for row in rows])
    return {"input_ids": ids, "labels": torch.tensor([row["label"] for row in rows])}


arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=16, use_cpu=True, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
)  # fmt: skip
clock = Clock()
Trainer(Classifier(), arguments, data_collator=collate, train_dataset=Reviews(), callbacks=[clock]).train()
(first, at), (last, then) = clock.warm, clock.last
print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
