"""Trains a character transformer on song lyrics; nearly all of a step is forward and backward.

"It is slow. But is there anything wrong?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))

torch.set_num_threads(1)
text = torch.randint(96, (200_000,))


class Singer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(96, 128), nn.Embedding(64, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(128, 96)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.layers(self.embed(x) + self.place.weight[: x.shape[1]], mask=mask, is_causal=True))


singer = Singer()
optimizer = torch.optim.AdamW(singer.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
began, warm, step = time.perf_counter(), None, 0
while True:
    starts = torch.randint(190_000, (16, 1))
    lines = text[starts + torch.arange(65)]
    loss = nn.functional.cross_entropy(singer(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(singer.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
