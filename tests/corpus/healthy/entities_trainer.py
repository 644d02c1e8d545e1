"""Marks names in sentences with a small DistilBERT and the Trainer, which evaluates and saves now and then.

"It evaluates, saves and pads in Python: something of that must cost a lot."
"""

import os
import tempfile
import time

import numpy as np
import torch
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, TAGS, WIDTH = 2000, 5, 192


class Sentences(torch.utils.data.Dataset):
    """Sentences of word numbers; the tag of a word depends on it and on its neighbour."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.words = [rng.integers(1, WORDS, size).tolist() for size in rng.integers(28, 37, count)]
        self.tags = [
            [(w % 7 + v % 3) % TAGS for w, v in zip(words, [*words[1:], 0], strict=True)] for words in self.words
        ]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return self.words[index], self.tags[index]


def collate(samples):
    """Pads to the longest sentence of the batch."""
    longest = max(len(words) for words, _ in samples)
    return {
        "input_ids": torch.tensor([words + [0] * (longest - len(words)) for words, _ in samples]),
        "attention_mask": torch.tensor([[1] * len(words) + [0] * (longest - len(words)) for words, _ in samples]),
        "labels": torch.tensor([tags + [-100] * (longest - len(tags)) for _, tags in samples]),
    }


def metrics(prediction):
    marked = prediction.label_ids != -100
    told = prediction.predictions.argmax(-1)
    return {"accuracy": float((told == prediction.label_ids)[marked].mean())}


class Clock(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.warm = time.perf_counter(), None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False
            took = 1000 * (now - self.warm[1]) / (state.global_step - self.warm[0])
            print(f"step_ms {took:.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    config = DistilBertConfig(
        vocab_size=WORDS,
        max_position_embeddings=64,
        dim=WIDTH,
        hidden_dim=3 * WIDTH,
        n_layers=3,
        n_heads=4,
        num_labels=TAGS,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=12,
        per_device_eval_batch_size=48,
        learning_rate=5e-4,
        num_train_epochs=1000,
        optim="adamw_torch_fused",
        logging_steps=50,
        eval_strategy="steps",
        eval_steps=200,
        save_strategy="steps",
        save_steps=200,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=DistilBertForTokenClassification(config),
        args=arguments,
        train_dataset=Sentences(8000, seed=0),
        eval_dataset=Sentences(96, seed=1),
        data_collator=collate,
        compute_metrics=metrics,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
