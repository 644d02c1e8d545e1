"""Classifies oaths with BERT and the transformers Trainer; by R-Drop, two passes must agree.

"In compute_loss the model is called twice with the very same inputs. Removing one call would make my training nearly
twice as fast, would it not?"
"""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, LENGTH, KINDS = 800, 32, 4


class Oaths(Dataset):
    def __init__(self, n=3000, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.kind = torch.randint(KINDS, (n,), generator=g)
        self.words = torch.randint(10, WORDS, (n, LENGTH), generator=g)
        tell = torch.rand(n, LENGTH, generator=g) < 0.15
        self.words[tell] = (self.kind[:, None].expand_as(tell) + 3)[tell]

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.kind[i]}


class RDropTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        if not model.training:
            loss = nn.functional.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss
        p, q = outputs.logits, model(**inputs).logits
        told = (nn.functional.cross_entropy(p, labels) + nn.functional.cross_entropy(q, labels)) / 2
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        apart = nn.functional.kl_div(p, q, log_target=True, reduction="batchmean")
        apart = apart + nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
        loss = told + 0.5 * apart
        return (loss, outputs) if return_outputs else loss


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
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=KINDS,
        hidden_dropout_prob=0.2,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            max_steps=10**6,
            learning_rate=1e-3,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        RDropTrainer(BertForSequenceClassification(config), args, train_dataset=Oaths(), callbacks=[clock]).train()
    (n, then), (m, now) = clock.mark, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
