"""Masked-token pre-training on generated protein fragments, in BPE pieces.

A pre-norm encoder, 15 % of the pieces are masked, cross-entropy with ignore_index.

"I went from single residues to 2500 pieces. The sequences became three times shorter, so I
expected a big gain, but a step costs about what it did before."
"""

import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

VOCAB, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 2500, 48, 96, 4, 3, 8
MASK, FIRST = 1, 4


class Fragments(IterableDataset):
    """Endless batches of masked fragments from a Zipf-like Markov source."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        rank = 1 / np.arange(1, VOCAB - FIRST + 1)
        self.cdf = np.cumsum(rank / rank.sum())
        self.follow = self.rng.integers(FIRST, VOCAB, VOCAB)

    def fragment(self):
        ids = FIRST + np.minimum(np.searchsorted(self.cdf, self.rng.random((BATCH, LENGTH))), VOCAB - FIRST - 1)
        copy = self.rng.random((BATCH, LENGTH - 1)) < 0.4
        ids[:, 1:] = np.where(copy, self.follow[ids[:, :-1]], ids[:, 1:])
        return ids

    def __iter__(self):
        while True:
            ids = self.fragment()
            hit = self.rng.random(ids.shape) < 0.15
            hit[:, 0] = True
            yield torch.from_numpy(np.where(hit, MASK, ids)), torch.from_numpy(np.where(hit, ids, -100))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class ProteinMLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.transform = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, labels):
        h = self.layers(self.tok(ids) + self.pos)
        if CURED:
            wanted = labels != -100
            h, labels = h[wanted], labels[wanted]
        logits = self.decoder(self.transform(h))  # cause: targets-ignored
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100)


def train(model, loader):
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=4e-4, fused=True
    )
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 200))
    t_start, t_mark, n_mark = time.perf_counter(), None, 0
    for n, (ids, labels) in enumerate(loader):
        now = time.perf_counter()
        if t_mark is None and now - t_start > 2:
            t_mark, n_mark = now, n
        if now - t_start > SECONDS:
            return (now - t_mark) / (n - n_mark) * 1e3
        loss = model(ids, labels)
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if n % 200 == 0:
            print(f"step {n} loss {loss.item():.3f}")
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"step_ms {train(ProteinMLM(), DataLoader(Fragments(), batch_size=None)):.3f}", flush=True)
