# cause: recompiles no-line
"""Trains a language model of folk tales with torch.compile; layers are left out at random, as a regularization.

"Compiled, it starts fast and stutters forever. I have already raised the limit of the cache."
"""

import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
LAYERS = 12


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.shrink(nn.functional.gelu(self.grow(self.norm(x + mixed))))


class Tales(nn.Module):
    def __init__(self, width=128, characters=90):
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.out = nn.Linear(width, characters)

    def forward(self, text, present):
        x = self.embed(text)
        for layer, used in zip(self.layers, present, strict=True):
            if isinstance(used, torch.Tensor):
                x = x + used * layer(x)
            elif used:
                x = x + layer(x)
        return self.out(x)


def drawn(chance):
    """Which layers take part, from now on for a few steps: numbers for a compiled graph would not change it."""
    present = [chance.random() > 0.3 for _ in range(LAYERS)]
    return torch.tensor(present, dtype=torch.float32).unbind() if CURED else tuple(present)


torch.set_num_threads(1)
torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 5000
chance = random.Random(3)
model = Tales()
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
began, warm, step = time.perf_counter(), None, 0
while True:
    if step % 30 == 0:
        present = drawn(chance)
    text = torch.randint(90, (5, 65))
    loss = nn.functional.cross_entropy(compiled(text[:, :-1], present).flatten(0, 1), text[:, 1:].flatten())
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
