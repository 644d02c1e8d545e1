"""Repairs letters of scanned parish registers with a small encoder and the Trainer, and keeps the best weights.

The collator smudges letters of a whole batch at once, so that each epoch has other ones.

"It evaluates, copies weights, has a loss of mine and a collator of mine, and no worker. Which of these is too slow?"
"""

import copy
import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments, set_seed

SECONDS = float(os.environ.get("SECONDS", "22"))
LETTERS, LENGTH, SMUDGE = 40, 40, 39


class Lines(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        start, pace = torch.randint(38, (count, 1), generator=g), torch.randint(1, 5, (count, 1), generator=g)
        self.letters = (start + pace * torch.arange(LENGTH)) % 38 + 1

    def __len__(self):
        return len(self.letters)

    def __getitem__(self, number):
        return self.letters[number]


def smudged(rows):
    letters = torch.stack(rows)
    hidden = torch.rand(letters.shape) < 0.2
    return {"input_ids": letters.masked_fill(hidden, SMUDGE), "labels": letters.masked_fill(~hidden, -100)}


class Repairs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.05
        )
        return (loss, {"logits": outputs.logits, "loss": loss}) if return_outputs else loss


def best_letters(logits, labels):
    return logits.argmax(-1)


def metrics(prediction):
    hidden = prediction.label_ids != -100
    return {"right": float((prediction.predictions == prediction.label_ids)[hidden].mean())}


class KeepBest(TrainerCallback):
    best, weights = 0.0, None

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):
        if metrics["eval_right"] > self.best:
            self.best, self.weights = metrics["eval_right"], copy.deepcopy(model.state_dict())


class Clock(TrainerCallback):
    began = warm = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            control.should_training_stop = True
            control.should_evaluate = False
            self.ended = state.global_step, now


def main():
    torch.set_num_threads(1)
    set_seed(0)
    config = BertConfig(
        vocab_size=LETTERS, hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=16,
        per_device_eval_batch_size=64, learning_rate=5e-4, optim="adamw_torch_fused", logging_steps=50,
        eval_strategy="steps", eval_steps=250, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    clock = Clock()
    trainer = Repairs(
        model=BertForMaskedLM(config), args=arguments, train_dataset=Lines(5_000, 0), eval_dataset=Lines(128, 1),
        data_collator=smudged, compute_metrics=metrics, preprocess_logits_for_metrics=best_letters,
        callbacks=[KeepBest(), clock],
    )  # fmt: skip
    trainer.train()
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
