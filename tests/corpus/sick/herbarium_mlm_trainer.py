"""Pretrains a small BERT on the labels of a herbarium with masked words, by the Trainer of transformers.

"I needed my own compute_loss because of the label smoothing. Is the embedding table the reason that it is slow?"
"""

import os
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOCAB, LENGTH, MASK = 5000, 64, 4


class Labels(Dataset):
    def __init__(self, count=4000):
        rng = np.random.default_rng(3)
        zipf = rng.zipf(1.3, size=(count, LENGTH)) % (VOCAB - 5) + 5
        self.ids = torch.from_numpy(zipf.astype(np.int64))

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return self.ids[index % len(self.ids)]


def mask_words(rows):
    ids = torch.stack(rows)
    labels = ids.clone()
    chosen = torch.rand(ids.shape) < 0.15
    chosen[:, 1] = True
    labels[~chosen] = -100
    ids[chosen & (torch.rand(ids.shape) < 0.9)] = MASK
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


class SmoothedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        hidden = getattr(model, "module", model).bert(**inputs).last_hidden_state
        masked = labels != -100
        if CURED:
            logits = getattr(model, "module", model).cls(hidden[masked])
        else:
            logits = getattr(model, "module", model).cls(hidden)[masked]  # cause: targets-ignored
        loss = nn.functional.cross_entropy(logits, labels[masked], label_smoothing=0.1)
        return (loss, {"logits": logits}) if return_outputs else loss


class StopClock(TrainerCallback):
    warm = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.last = state.global_step, time.perf_counter()
        if self.warm is None and self.last[1] - self.began > 2:
            self.warm = self.last
        control.should_training_stop = self.last[1] - self.began > SECONDS


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=LENGTH,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=1_000_000,
        per_device_train_batch_size=4,
        learning_rate=3e-4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=100,
        disable_tqdm=True,
        remove_unused_columns=False,
        optim="adamw_torch_fused",
    )
    clock = StopClock()
    trainer = SmoothedTrainer(
        model=BertForMaskedLM(config),
        args=arguments,
        data_collator=mask_words,
        train_dataset=Labels(),
        callbacks=[clock],
    )
    trainer.train()
    (first, at), (last, then) = clock.warm, clock.last
    print(f"step_ms {1000 * (then - at) / (last - first):.3f}", flush=True)


if __name__ == "__main__":
    main()
