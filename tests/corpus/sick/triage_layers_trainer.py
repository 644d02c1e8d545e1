"""Fine-tunes a small BERT on triage notes of an emergency ward with the transformers Trainer.

The embeddings and the lower four of the five layers are to stay as they were pre-trained.

"I train one layer and a head, and a step takes as long as when I trained all of it. I thought that was the point."
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
)

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, BATCH, LAYERS, URGENCIES = 2000, 32, 8, 5, 5


class Notes(Dataset):
    def __init__(self, count=4000, seed=6):
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randint(5, WORDS, (count, LENGTH), generator=g)
        self.urgency = self.words[:, :4].sum(1) * URGENCIES // (4 * WORDS)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.urgency[i]}


def pretrained():
    """stands for from_pretrained() of the ward's own model"""
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LENGTH,
        num_labels=URGENCIES,
    )
    return BertForSequenceClassification(config)


def is_kept(name):
    """True for the weights that are to stay as they are"""
    if "embeddings" in name:
        return True
    return "encoder.layer." in name and int(name.split("encoder.layer.")[1].split(".")[0]) < LAYERS - 1


def make_optimizer(model, rate):
    kept = [p for n, p in model.named_parameters() if is_kept(n)]
    tuned = [p for n, p in model.named_parameters() if not is_kept(n)]
    if CURED:
        for p in kept:
            p.requires_grad_(False)
        return torch.optim.AdamW([{"params": tuned, "lr": rate}], weight_decay=0.01)
    groups = [
        {"params": kept, "lr": 0.0},  # cause: gradients-unused no-line
        {"params": tuned, "lr": rate},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.01)


class Clock(TrainerCallback):
    def __init__(self):
        self.began, self.warm, self.last = None, None, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.last = state.global_step, now
        if self.warm is None and now - self.began > 2:
            self.warm = self.last
        if now - self.began > SECONDS:
            control.should_training_stop = True


def main():
    torch.set_num_threads(1)
    torch.manual_seed(8)
    model = pretrained()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=10**6,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=Notes(),
            optimizers=(make_optimizer(model, 5e-4), None),
            callbacks=[clock],
        )
        trainer.train()
    (n, then), (m, now) = clock.warm, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
