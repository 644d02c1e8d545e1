"""Trains a small GPT-2 on petitions with the transformers Trainer; words that matter weigh more in the loss.

"With my weighted loss the training is slower than with the stock one. I expected a weighted cross entropy to cost
exactly as much as one without weights."
"""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, BATCH = 1200, 40, 8


class Petitions(Dataset):
    def __init__(self, n=4000, seed=12):
        g = torch.Generator().manual_seed(seed)
        rare = torch.rand(n, LENGTH, generator=g).square()
        self.words = (rare * WORDS).long()
        self.words[:, 1::2] = (self.words[:, ::2] * 3 + 1) % WORDS

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.words[i]}


class WeightedTrainer(Trainer):
    """Trains on the weighted loss and keeps the plain one, to compare it with that of earlier runs."""

    def __init__(self, *args, word_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.word_weights, self.plain, self.seen = word_weights, torch.zeros(()), 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        labels = inputs["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, labels, self.word_weights)
        if CURED:
            plain = outputs.loss
        else:
            plain = super().compute_loss(model, inputs)  # cause: hot-line
        self.plain += plain.detach()
        self.seen += 1
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        if self.seen:
            logs["plain_loss"] = (self.plain / self.seen).item()
            self.plain, self.seen = torch.zeros(()), 0
        super().log(logs, *args, **kwargs)


class Clock(TrainerCallback):
    def __init__(self):
        self.began, self.mark, self.last = time.perf_counter(), None, None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.last = state.global_step, now
        if self.mark is None and now - self.began > 2:
            self.mark = self.last
        if now - self.began > SECONDS:
            control.should_training_stop = True


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    weights = torch.ones(WORDS)
    weights[WORDS // 2 :] = 3.0
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=10**6,
            learning_rate=1e-3,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = WeightedTrainer(
            GPT2LMHeadModel(config),
            args,
            train_dataset=Petitions(),
            callbacks=[clock],
            word_weights=weights,
        )
        trainer.train()
    (n, then), (m, now) = clock.mark, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
