"""Sorts letters of complaint by department with a small BERT and the Trainer of transformers.

"I took all the settings of a well-known fine-tuning guide and still wait until tomorrow."
"""

import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Letters(Dataset):
    def __init__(self, count=4_000, length=48):
        self.tokens = torch.randint(1, 800, (count, length))
        self.departments = torch.randint(0, 6, (count,))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        return {"input_ids": self.tokens[number], "labels": self.departments[number]}


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
    config = BertConfig(
        vocab_size=800, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=64, num_labels=6,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=16,
        gradient_accumulation_steps=1, learning_rate=5e-5, warmup_steps=100, logging_steps=100, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=not CURED,  # cause: activations-recomputed no-line
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=args, train_dataset=Letters(), callbacks=[clock]
    )
    trainer.train()
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
