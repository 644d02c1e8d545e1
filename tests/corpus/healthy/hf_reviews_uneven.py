"""Classifies generated product reviews of very uneven length with DistilBERT under the transformers Trainer.

It logs the learning curve and evaluates now and then; the batches are padded to their longest review.

"Some steps take three times as long as others."
"""

import os
import random
import tempfile
import time

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

GOOD = "great lovely solid fast perfect recommend bright quiet".split()
BAD = "broken slow cheap returned noisy scratched useless weak".split()
OTHER = [a + b for a in ("ka", "lo", "mi", "re", "su", "ti") for b in ("na", "pe", "ro", "ve", "zu", "ni", "la")]
VOCAB = {word: i for i, word in enumerate(["[PAD]", "[CLS]", *GOOD, *BAD, *OTHER])}


def review(rnd):
    label = rnd.randrange(2)
    length = min(100, max(6, int(rnd.lognormvariate(3, 0.7))))
    words = [rnd.choice((BAD, GOOD)[label]) if rnd.random() < 0.15 else rnd.choice(OTHER) for _ in range(length)]
    return {"input_ids": np.array([VOCAB[w] for w in ["[CLS]", *words]]), "labels": label}


def reviews(number, seed):
    rnd = random.Random(seed)
    return [review(rnd) for _ in range(number)]


def collate(rows):
    ids = pad_sequence([torch.from_numpy(row["input_ids"]) for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def accuracy(result):
    return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())}


class Bench(TrainerCallback):
    begin = warm = None
    step_ms = float("nan")

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.begin is None:
            self.begin = now
        if self.warm is None and now - self.begin > 2:
            self.warm = (now, state.global_step)
        if now - self.begin > SECONDS:
            self.step_ms = 1000 * (now - self.warm[0]) / (state.global_step - self.warm[1])
            control.should_training_stop = True


def main():
    transformers.set_seed(5)
    bench = Bench()
    model = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(VOCAB), dim=96, hidden_dim=256, n_layers=3, n_heads=4, max_position_embeddings=128
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=1_000_000,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=16,
            train_sampling_strategy="group_by_length",
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            logging_steps=50,
            eval_strategy="steps",
            eval_steps=400,
            save_strategy="best",
            metric_for_best_model="accuracy",
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=args,
            data_collator=collate,
            train_dataset=reviews(6000, 1),
            eval_dataset=reviews(48, 2),
            compute_metrics=accuracy,
            callbacks=[bench, EarlyStoppingCallback(1000)],
        )
        trainer.train()
    print(f"step_ms {bench.step_ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
