"""Distils a small encoder of support tickets from a larger one with the Trainer of transformers; words are masked anew.

"The teacher runs in each step and learns nothing, and there is a callback. How much of the time is wasted?"
"""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))


class Tickets(Dataset):
    def __init__(self):
        self.tokens = torch.randint(5, 1000, (3000, 40), generator=torch.Generator().manual_seed(6))

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index % 3000], "labels": index % 8}


def bert(width, layers):
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    return BertForSequenceClassification(BertConfig(vocab_size=1000, num_labels=8, num_attention_heads=4, **shape))


class Distiller(Trainer):
    def __init__(self, *args, teacher, **more):
        super().__init__(*args, **more)
        self.teacher = teacher.eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        masked = inputs["input_ids"].masked_fill(torch.rand(inputs["input_ids"].shape) < 0.15, 4)
        with torch.no_grad():
            soft = self.teacher(input_ids=masked).logits.softmax(-1)
        out = model(input_ids=masked, labels=inputs["labels"])
        loss = 0.5 * out.loss + 0.5 * nn.functional.cross_entropy(out.logits, soft)
        return (loss, out) if return_outputs else loss


class Watch(TrainerCallback):
    warm = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.last = state.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = time.perf_counter() - self.began > SECONDS


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=16, learning_rate=3e-4, warmup_steps=50,
        lr_scheduler_type="cosine", max_grad_norm=1.0, logging_steps=100, save_strategy="no", use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    watch = Watch()
    Distiller(bert(96, 2), arguments, train_dataset=Tickets(), teacher=bert(128, 3), callbacks=[watch]).train()
    (first, at), (last, then) = watch.warm, watch.last
    print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)
