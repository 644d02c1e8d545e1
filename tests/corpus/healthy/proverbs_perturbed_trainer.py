"""Sorts proverbs by their region with a small BERT and the Trainer; each batch is learned a second time, perturbed.

The words' embeddings are moved along the gradient of the first pass (FGM), and the gradients of both passes add up.

"Two forward and two backward passes for one step: the Trainer's progress is half of what I was used to."
"""

import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, REGIONS, LENGTH = 3000, 9, 24


class Proverbs(Dataset):
    def __init__(self, count=4000):
        g = torch.Generator().manual_seed(0)
        self.region = torch.randint(0, REGIONS, (count,), generator=g)
        self.words = torch.randint(0, WORDS, (count, LENGTH), generator=g)
        self.words[:, ::3] = self.words[:, ::3] // REGIONS * REGIONS + self.region[:, None]
        self.words.clamp_(max=WORDS - 1)
        self.mask = torch.ones(LENGTH, dtype=torch.long)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "attention_mask": self.mask, "labels": self.region[i]}


class Perturbing(Trainer):
    epsilon = 0.5

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = self.accelerator.unwrap_model(model).get_input_embeddings().weight
        norm = weight.grad.norm()
        with torch.no_grad():
            move = weight.grad * (self.epsilon / (norm + 1e-8))
            weight.add_(move)
        super().training_step(model, inputs, num_items_in_batch)
        with torch.no_grad():
            weight.sub_(move)
        return loss


class Budget(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.warm = time.perf_counter(), None

    def on_step_end(self, args, state, control, **kwargs):
        self.now, self.step = time.perf_counter(), state.global_step
        if self.warm is None and self.now - self.began > 2:
            self.warm = self.step, self.now
        if self.now - self.began > SECONDS:
            control.should_training_stop = True
        return control


def main():
    torch.set_num_threads(1)
    set_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=REGIONS,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=1_000_000, learning_rate=3e-4,
        use_cpu=True, save_strategy="no", report_to=[], logging_steps=200, disable_tqdm=True,
    )  # fmt: skip
    budget = Budget()
    Perturbing(
        model=BertForSequenceClassification(config), args=args, train_dataset=Proverbs(), callbacks=[budget]
    ).train()
    (step, at), now = budget.warm, budget.now
    print(f"step_ms {1000 * (now - at) / (budget.step - step):.3f}", flush=True)


if __name__ == "__main__":
    main()
