"""Trains a small RoBERTa with masked language modelling on synthetic sentences with the transformers Trainer.

The batches are padded dynamically; every 50 steps a line is logged, validation is rare
and the EMA of the weights is done in place with foreach.

"I have callbacks, an EMA, a custom collator and no workers: every blog tells me one of these is slow. Which?"
"""

import os
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PrinterCallback, RobertaConfig, RobertaForMaskedLM, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)

VOCAB, PAD, MASK = 2000, 1, 4


class Sentences(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        start = rng.integers(10, VOCAB, n)
        self.rows = [
            ((s + 3 * np.arange(m)) % (VOCAB - 10) + 10).astype(np.int64)
            for s, m in zip(start, rng.integers(24, 49, n), strict=False)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"ids": self.rows[i]}


def mask_collator(rows):
    width = -(-max(len(r["ids"]) for r in rows) // 8) * 8
    ids = np.full((len(rows), width), PAD, dtype=np.int64)
    for k, r in enumerate(rows):
        ids[k, : len(r["ids"])] = r["ids"]
    ids = torch.from_numpy(ids)
    real = ids != PAD
    chosen = (torch.rand(ids.shape) < 0.15) & real
    return {
        "input_ids": ids.masked_fill(chosen, MASK),
        "attention_mask": real.long(),
        "labels": ids.masked_fill(~chosen, -100),
    }


class Ema(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kw):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.avg = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kw):
        if state.global_step % 10 == 0:
            torch._foreach_lerp_(self.avg, self.params, 0.01)


class Timed(TrainerCallback):
    def on_train_begin(self, *a, **kw):
        self.start, self.from_ = time.perf_counter(), None

    def on_step_end(self, args, state, control, **kw):
        t = time.perf_counter() - self.start
        if self.from_ is None and t > 2:
            self.from_ = t, state.global_step
        if t > SECONDS:
            control.should_training_stop = True
            control.should_evaluate = False
            self.ms = (t - self.from_[0]) / (state.global_step - self.from_[1]) * 1e3


if __name__ == "__main__":
    cfg = RobertaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=80,
        pad_token_id=PAD,
    )
    timed = Timed()
    with tempfile.TemporaryDirectory() as tmp:
        args = TrainingArguments(
            output_dir=tmp,
            use_cpu=True,
            max_steps=10**6,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=16,
            learning_rate=5e-4,
            logging_steps=50,
            eval_strategy="steps",
            eval_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        tr = Trainer(
            model=RobertaForMaskedLM(cfg),
            args=args,
            data_collator=mask_collator,
            train_dataset=Sentences(6000, 0),
            eval_dataset=Sentences(64, 1),
            callbacks=[Ema(), timed],
        )
        tr.remove_callback(PrinterCallback)
        tr.train()
    print(f"step_ms {timed.ms:.3f}", flush=True)
