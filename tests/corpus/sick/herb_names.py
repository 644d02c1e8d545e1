"""Learns vectors for the words of old herbals, skip-gram with negative samples.

For each pair of a word and its neighbour ten other words are drawn, the frequent ones more often
(the usual power of 0.75 of the counts).

"The gensim people do millions of words per second, my loop does some thirty thousand pairs and
embeddings plus a dot product can't be that slow."
"""

import os
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
WORDS, WIDTH, PAIRS, NEGATIVES, TEXT = 4000, 96, 768, 10, 300_000


def make_text(rng):
    counts = 1.0 / (np.arange(WORDS) + 3)
    text = rng.choice(WORDS, size=TEXT, p=counts / counts.sum())
    # a word is often followed by the one that belongs to it
    follows = rng.random(TEXT) < 0.3
    text[1:][follows[1:]] = (text[:-1][follows[1:]] * 7 + 11) % WORDS
    return text


class NegativeTable:
    def __init__(self, text):
        counts = np.bincount(text, minlength=WORDS) ** 0.75
        self.p = counts / counts.sum()
        self.cdf = np.cumsum(self.p)

    def draw(self, pairs):
        if CURED:
            drawn = np.searchsorted(self.cdf, np.random.random((pairs, NEGATIVES)) * self.cdf[-1])
            return torch.from_numpy(drawn)
        rows = []
        for _ in range(pairs):
            rows.append(np.random.choice(WORDS, size=NEGATIVES, p=self.p))  # cause: hot-line
        return torch.from_numpy(np.stack(rows))


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.context = nn.Embedding(WORDS, WIDTH)
        nn.init.uniform_(self.word.weight, -0.5 / WIDTH, 0.5 / WIDTH)
        nn.init.zeros_(self.context.weight)

    def forward(self, words, contexts, negatives):
        v = self.word(words)
        good = (v * self.context(contexts)).sum(1)
        bad = torch.bmm(self.context(negatives), v[:, :, None])[:, :, 0]
        return -(nn.functional.logsigmoid(good) + nn.functional.logsigmoid(-bad).sum(1)).mean()


def pairs_of(text, rng, window=4):
    """Batches of words and of neighbours, both as tensors."""
    while True:
        centre = rng.integers(window, TEXT - window, size=PAIRS)
        shift = rng.integers(1, window + 1, size=PAIRS) * rng.choice([-1, 1], size=PAIRS)
        yield torch.from_numpy(text[centre]), torch.from_numpy(text[centre + shift])


def main():
    torch.manual_seed(0)
    np.random.seed(0)
    rng = np.random.default_rng(1)
    text = make_text(rng)
    table = NegativeTable(text)
    model = SkipGram()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    step, mark = 0, None
    began = time.perf_counter()
    for words, contexts in pairs_of(text, rng):
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        loss = model(words, contexts, table.draw(len(words)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
