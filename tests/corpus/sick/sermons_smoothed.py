"""Trains a small transformer that translates old sermons into plain English, after the Annotated Transformer.

One vocabulary serves both languages; the embeddings of source, target and output are shared.

"The model is tiny, two layers of width 64. A colleague has the same layers and the same vocabulary in his own code,
and makes half again as many steps in a minute."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOCAB, LENGTH, BATCH, WIDTH = 8000, 20, 16, 64
PAD, BOS = 0, 1


class LabelSmoothing(nn.Module):
    """KL divergence from a target distribution that leaves some mass to the wrong words."""

    def __init__(self, size, padding_idx, smoothing=0.1):
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.size, self.padding_idx = size, padding_idx
        self.confidence, self.smoothing = 1.0 - smoothing, smoothing
        self.true_dist = None

    def forward(self, logits, target):
        if CURED:
            return nn.functional.cross_entropy(
                logits, target, ignore_index=self.padding_idx, label_smoothing=self.smoothing, reduction="sum"
            )
        logp = logits.log_softmax(-1)
        true_dist = logp.detach().clone()
        true_dist.fill_(self.smoothing / (self.size - 2))
        true_dist.scatter_(1, target.unsqueeze(1), self.confidence)
        true_dist[:, self.padding_idx] = 0
        padded = torch.nonzero(target == self.padding_idx)
        true_dist.index_fill_(0, padded.squeeze(1), 0.0)
        self.true_dist = true_dist
        return self.criterion(logp, true_dist.clone().detach())  # cause: hot-line


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.transformer = nn.Transformer(
            WIDTH, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=256, dropout=0.1,
            batch_first=True,
        )  # fmt: skip
        self.generator = nn.Linear(WIDTH, VOCAB)
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.generator.weight = self.embed.weight
        self.register_buffer("ahead", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def read(self, words):
        return self.embed(words) * WIDTH**0.5 + self.place

    def forward(self, source, target):
        hidden = self.transformer(self.read(source), self.read(target), tgt_mask=self.ahead, tgt_is_causal=True)
        return self.generator(hidden)


def make_corpus(count=20_000, seed=17):
    g = torch.Generator().manual_seed(seed)
    rare = torch.rand(count, LENGTH, generator=g).square()
    source = 2 + (rare * (VOCAB - 2)).long().clamp(max=VOCAB - 3)
    target = 2 + (source.flip(1) * 7 + 3) % (VOCAB - 2)
    return source, target


def noam(step, warmup=400):
    step = max(step, 1)
    return WIDTH**-0.5 * min(step**-0.5, step * warmup**-1.5)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source, target = make_corpus()
    shifted = torch.cat([torch.full((len(target), 1), BOS), target[:, :-1]], 1)
    model = Translator()
    criterion = LabelSmoothing(VOCAB, PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)
    model.train()

    began, warm, step = time.perf_counter(), None, 0
    while True:
        chosen = torch.randint(len(source), (BATCH,))
        wanted = target[chosen]
        logits = model(source[chosen], shifted[chosen])
        loss = criterion(logits.flatten(0, 1), wanted.flatten()) / wanted.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
