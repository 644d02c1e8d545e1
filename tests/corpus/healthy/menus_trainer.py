"""Sorts dishes of menus by kitchen with a small DistilBERT and the Trainer; pads to the longest row of each batch.

"It stops for an evaluation every now and then, and a callback of mine writes a file. Could I leave them out?"
"""

import json
import os
import random
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SECONDS = float(os.environ.get("SECONDS", "22"))


class Dishes(Dataset):
    def __init__(self, count, seed):
        source = random.Random(seed)
        self.rows = []
        for _ in range(count):
            words = [source.randrange(1, 700) for _ in range(source.randint(28, 36))]
            self.rows.append({"input_ids": torch.tensor(words), "labels": source.randrange(8)})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def collate(rows):
    words = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": words,
        "attention_mask": (words != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


class Notes(TrainerCallback):
    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


class Clock(TrainerCallback):
    began = warm = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            control.should_training_stop = True
            self.ended = state.global_step, now


def main():
    torch.set_num_threads(1)
    config = DistilBertConfig(
        vocab_size=700, dim=96, n_layers=3, n_heads=4, hidden_dim=192, max_position_embeddings=40, num_labels=8
    )
    directory = tempfile.mkdtemp()
    args = TrainingArguments(
        output_dir=directory, max_steps=1_000_000, per_device_train_batch_size=32, per_device_eval_batch_size=64,
        learning_rate=2e-4, logging_steps=50, eval_strategy="steps", eval_steps=300, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config), args=args, train_dataset=Dishes(6_000, 0),
        eval_dataset=Dishes(256, 1), data_collator=collate,
        callbacks=[clock, Notes(os.path.join(directory, "notes.jsonl"))],
    )  # fmt: skip
    trainer.train()
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
