# ranks: 2
"""Trains an encoder of sentences on two ranks; batches differ in length, and at each step both ranks have the same one.

"The steps take between 20 and 90 ms. Which rank is to blame?"
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 96)
        self.layer = nn.TransformerEncoderLayer(96, 4, 256, batch_first=True)
        self.out = nn.Linear(96, 50)

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens)).mean(1))


dist.init_process_group("gloo")
model = DistributedDataParallel(Encoder())
optimizer = torch.optim.Adam(model.parameters())
lengths = torch.Generator().manual_seed(12)  # the same on both ranks
words = torch.Generator().manual_seed(dist.get_rank())
began, warm, step = time.perf_counter(), None, 0
while True:
    length = int(torch.randint(8, 96, (1,), generator=lengths))
    tokens = torch.randint(2000, (16, length), generator=words)
    loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 50)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 25 == 0:
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
if dist.get_rank() == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
