"""Fine-tunes the top of a small BERT on generated support tickets.

The lower part of the encoder stays as it was pre-trained; only the last layer, the pooler
and a new classifier are trained, with different learning rates.

"A colleague trains all layers of the same model and is barely slower than I am with one layer.
I had read that partial fine-tuning is cheap!"
"""

# cause: gradients-unused no-line
import os
import random
import time

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

QUEUES = 6
VOCAB = 1200


def make_tickets(count=4000):
    rnd = random.Random(42)
    topics = [[rnd.randrange(10, VOCAB) for _ in range(60)] for _ in range(QUEUES)]
    tickets = []
    for _ in range(count):
        q = rnd.randrange(QUEUES)
        words = [rnd.choice(topics[q]) if rnd.random() < 0.3 else rnd.randrange(10, VOCAB) for _ in range(40)]
        tickets.append((words[: rnd.randint(34, 40)], q))
    return tickets


def collate(batch):
    longest = max(len(w) for w, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, (w, _) in zip(ids, batch, strict=False):
        row[: len(w)] = torch.tensor(w)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([q for _, q in batch]),
    }


def build_model():
    cfg = BertConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=64,
        num_labels=QUEUES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(cfg)


def build_optimizer(model):
    top = [model.bert.encoder.layer[-1], model.bert.pooler]
    if CURED:
        model.requires_grad_(False)
        for m in [*top, model.classifier]:
            m.requires_grad_(True)
    groups = [
        {"params": [p for m in top for p in m.parameters()], "lr": 5e-5},
        {"params": list(model.classifier.parameters()), "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.01, fused=True)


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = build_optimizer(model)
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, 100, 20_000)
        self.global_step = 0

    def training_step(self, batch):
        self.model.train()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.global_step += 1
        return loss

    def fit(self):
        start, mark = time.perf_counter(), None
        while True:
            for batch in self.loader:
                loss = self.training_step(batch)
                if self.global_step % 100 == 0:
                    print({"step": self.global_step, "loss": round(loss.item(), 4)})
                t = time.perf_counter() - start
                if mark is None and t > 2:
                    mark = (t, self.global_step)
                if t > SECONDS:
                    return 1000 * (t - mark[0]) / (self.global_step - mark[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(42)
    loader = DataLoader(make_tickets(), batch_size=8, shuffle=True, collate_fn=collate, drop_last=True)
    print(f"step_ms {Trainer(build_model(), loader).fit():.3f}", flush=True)
