"""Sorts readers' letters into departments with a small BERT under the Trainer of transformers.

"Most of our letters are two or three sentences. Last month we added some long ones, less than one in a hundred, and
the whole training became slower by far more than one in a hundred."
"""

import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
WORDS, DEPARTMENTS, LETTERS = 3000, 8, 4000


class Letters(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.department = torch.randint(DEPARTMENTS, (LETTERS,), generator=g).tolist()
        length = torch.randint(14, 41, (LETTERS,), generator=g)
        long = torch.rand(LETTERS, generator=g) < 0.004
        length[long] = torch.randint(70, 97, (int(long.sum()),), generator=g)
        self.words = []
        for department, n in zip(self.department, length.tolist(), strict=True):
            words = torch.randint(1, WORDS, (n,), generator=g)
            tell = torch.rand(n, generator=g) < 0.2
            words[tell] = words[tell] % 20 + 20 * department + 1
            self.words.append(words.tolist())

    def __len__(self):
        return LETTERS

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "label": self.department[i]}


class Collator:
    """Pads the letters of a batch with zeros."""

    def __init__(self, letters):
        self.longest = max(len(words) for words in letters.words)

    def __call__(self, rows):
        n = self.longest  # cause: padded-batches no-line
        if CURED:
            n = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (n - len(row["input_ids"])) for row in rows])
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([row["label"] for row in rows]),
        }


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
    letters = Letters()
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=128,
            num_labels=DEPARTMENTS,
        )
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=1_000_000,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=letters, data_collator=Collator(letters), callbacks=[clock]
        )
        trainer.train()
    (n, then), (m, now) = clock.mark, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
