"""Tells from an entry in a ship's log which ocean it was written in, with DistilBERT's shape and the Trainer.

The entries are pages, cut into pieces of 64 tokens, so nearly every row is full. There is a
short evaluation now and then.

"I pad to max_length and log every ten steps, I read that one should not do either."
"""

import os
import random
import tempfile
import time

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)  # fmt: skip

SECONDS = float(os.environ.get("SECONDS", "22"))
OCEANS, PAGES, PIECE = 5, 500, 64


def write_pages():
    rng = random.Random(11)
    syllables = ["wind", "fore", "sail", "sou", "wes", "ter", "ly", "calm", "fath", "om", "reef", "mast", "swell"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(700)]
    local = [rng.sample(words, 50) for _ in range(OCEANS)]
    oceans = [rng.randrange(OCEANS) for _ in range(PAGES)]
    pages = []
    for ocean in oceans:
        length = rng.randint(500, 640)
        pages.append(" ".join(rng.choice(local[ocean] if rng.random() < 0.2 else words) for _ in range(length)))
    return pages, oceans


def train_tokenizer(pages):
    tok = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.train_from_iterator(pages, trainers.WordLevelTrainer(vocab_size=1500, special_tokens=["[PAD]", "[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]")


class Pieces(Dataset):
    def __init__(self, pages, oceans, tokenizer):
        rows = tokenizer(
            pages, truncation=True, max_length=PIECE, padding="max_length", return_overflowing_tokens=True,
            return_tensors="pt",
        )  # fmt: skip
        self.ids, self.mask = rows["input_ids"], rows["attention_mask"]
        self.labels = torch.tensor(oceans)[rows["overflow_to_sample_mapping"]]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


class Clock(TrainerCallback):
    began = warm = ended = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            self.ended = state.global_step, now
            control.should_training_stop = True


def scores(prediction):
    return {"right": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main():
    torch.set_num_threads(1)
    pages, oceans = write_pages()
    tokenizer = train_tokenizer(pages)
    train = Pieces(pages[:-8], oceans[:-8], tokenizer)
    kept = Pieces(pages[-8:], oceans[-8:], tokenizer)
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=128, hidden_dim=384, n_layers=2, n_heads=4, max_position_embeddings=PIECE,
        num_labels=OCEANS,
    )  # fmt: skip
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=12, per_device_eval_batch_size=40,
            num_train_epochs=1000, learning_rate=5e-4, logging_steps=10, eval_strategy="steps", eval_steps=300,
            save_strategy="no", report_to="none", disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = Trainer(
            model=DistilBertForSequenceClassification(config), args=args, train_dataset=train, eval_dataset=kept,
            data_collator=default_data_collator, compute_metrics=scores, callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
