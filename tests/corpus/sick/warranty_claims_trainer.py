"""Sorts warranty claims with a small BERT and the transformers Trainer, which evaluates during the run.

"The held-out claims are few, a hundred and sixty short texts, fewer than the model trains on between two evaluations.
Even so the evaluations have become about half of the run."
"""

import os
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, DEPARTMENTS = 2000, 32, 5


class Claims(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.departments = torch.randint(DEPARTMENTS, (count,), generator=g)
        self.words = torch.randint(10, WORDS, (count, LENGTH), generator=g)
        telling = 10 + 20 * self.departments[:, None] + torch.randint(20, (count, 4), generator=g)
        self.words[:, 3:7] = telling
        self.mask = torch.ones(LENGTH, dtype=torch.long)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "attention_mask": self.mask, "labels": self.departments[index]}


class Clock(TrainerCallback):
    def __init__(self):
        self.began, self.warm, self.last = time.perf_counter(), None, None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.last = state.global_step, now
        if self.warm is None and now - self.began > 2:
            self.warm = self.last
        if now - self.began > SECONDS:
            control.should_training_stop = True


def score(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=LENGTH,
        num_labels=DEPARTMENTS,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=1_000_000,
            learning_rate=5e-4,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=32 if CURED else 1,  # cause: frequent-validation no-line
            eval_strategy="steps",
            eval_steps=20,
            logging_steps=500,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=args,
            train_dataset=Claims(4_000, seed=1),
            eval_dataset=Claims(160, seed=2),
            compute_metrics=score,
            callbacks=[clock],
        )
        trainer.train()
    (first, then), (last, now) = clock.warm, clock.last
    print(f"step_ms {1000 * (now - then) / (last - first):.3f}", flush=True)


if __name__ == "__main__":
    main()
