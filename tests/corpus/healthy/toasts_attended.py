"""Writes toasts letter by letter: a small transformer with attention as it is taught, over half a line at a time.

"I was told to use the fused attention everywhere. I timed it on this model: on our CPU it is no faster, and I like to
see what is computed."
"""

import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS = "a toast to the bride and groom , may your days be long and your nights warm . to friends old and new !".split()
BATCH, LENGTH, WIDTH, HEADS = 24, 48, 48, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.into(x).split(WIDTH, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        mixed = weights @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Writer(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, text):
        return self.out(self.blocks(self.letter(text) + self.place.weight[: text.shape[1]]))


def main():
    torch.manual_seed(0)
    order = torch.randint(len(WORDS), (40_000,)).tolist()
    book = " ".join(WORDS[each] for each in order)
    letters = {letter: number for number, letter in enumerate(sorted(set(book)))}
    data = torch.tensor([letters[letter] for letter in book])
    model = Writer(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    offsets = torch.arange(LENGTH + 1)

    began, mark, step = time.perf_counter(), None, 0
    while True:
        text = data[torch.randint(len(data) - LENGTH - 1, (BATCH, 1)) + offsets]
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step}: {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = (step, now)
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
