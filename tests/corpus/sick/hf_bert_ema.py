"""Trains a small BERT classifier with the transformers Trainer while an average of the weights is kept.

The averaged weights are what is evaluated in the end (Polyak / EMA).

"With the average on, an epoch takes far longer, and the profiler in Chrome shows gaps between the
optimizer and the next forward in which no torch op that I know of seems to run."
"""

import copy
import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as hf_logging

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
hf_logging.set_verbosity_error()

VOCAB = 20000


class Reviews(Dataset):
    """ids with a class-dependent vocabulary, 24 tokens"""

    def __init__(self, n=5000):
        g = torch.Generator().manual_seed(3)
        self.y = torch.randint(0, 3, (n,), generator=g)
        base = torch.randint(0, VOCAB, (n, 24), generator=g)
        topical = torch.rand(n, 24, generator=g) < 0.15
        self.x = torch.where(topical, self.y[:, None] * 100 + base % 100, base)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


class EMACallback(TrainerCallback):
    def __init__(self, decay=0.999):
        self.decay = decay
        self.shadow = None

    def on_train_begin(self, args, state, control, model=None, **kw):
        self.shadow = copy.deepcopy(model.state_dict())

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kw):
        if CURED:
            own = [v for v in self.shadow.values() if v.is_floating_point()]
            new = [v for v in model.state_dict().values() if v.is_floating_point()]
            torch._foreach_lerp_(own, new, 1 - self.decay)
            return
        current = copy.deepcopy(model.state_dict())  # cause: hot-line
        for k, v in current.items():
            if v.is_floating_point():
                self.shadow[k] = self.decay * self.shadow[k] + (1 - self.decay) * v


class WallClock(TrainerCallback):
    def on_train_begin(self, args, state, control, **kw):
        self.t0, self.ref = time.perf_counter(), None

    def on_step_end(self, args, state, control, **kw):
        now = time.perf_counter()
        if self.ref is None and now - self.t0 > 2:
            self.ref = (now, state.global_step)
        if now - self.t0 > SECONDS:
            self.step_ms = 1e3 * (now - self.ref[0]) / (state.global_step - self.ref[1])
            control.should_training_stop = True
        return control


def main():
    cfg = BertConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=64,
        num_labels=3,
    )
    clock = WallClock()
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            use_cpu=True,
            per_device_train_batch_size=4,
            learning_rate=2e-2,
            optim="sgd",
            max_grad_norm=0,
            max_steps=1_000_000,
            logging_steps=100_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        Trainer(
            model=BertForSequenceClassification(cfg),
            args=args,
            train_dataset=Reviews(),
            callbacks=[EMACallback(), clock],
        ).train()
    print(f"step_ms {clock.step_ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
