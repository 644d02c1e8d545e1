"""Trains a small transformer that was written by hand; its blocks are a loop, and so are its heads.

"Every tutorial says: no Python loops in forward."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
HEADS, WIDTH = 4, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        of_heads = []
        for query, key, value in zip(*(part.chunk(HEADS, -1) for part in self.project(x).chunk(3, -1)), strict=True):
            weights = (query @ key.transpose(1, 2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
            of_heads.append(weights @ value)
        return self.out(torch.cat(of_heads, -1))

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Proverbs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x = x - x.mean(-1, keepdim=True)
        return self.out(x)


torch.set_num_threads(1)
text = torch.randint(96, (200_000,))
model = Proverbs()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
began, warm, step = time.perf_counter(), None, 0
while True:
    starts = torch.randint(190_000, (16, 1))
    lines = text[starts + torch.arange(65)]
    loss = nn.functional.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
