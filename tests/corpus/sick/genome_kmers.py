"""Trains a classifier of genome reads with a dictionary of all k-mers in memory.

"I was afraid of memory leaks, so I collect after every batch."
"""

import gc
import itertools
import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

torch.set_num_threads(1)
kmers = {"".join(letters): [number] for number, letters in enumerate(itertools.product("ACGT", repeat=7))}
occurs = [{"read": n, "at": [n]} for n in range(10_000)]
reads = ["".join(random.choices("ACGT", k=100)) for _ in range(2000)]
embed = nn.Embedding(4**7, 32)
head = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 3))
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.05)
began, warm, step = time.perf_counter(), None, 0
while True:
    batch = random.choices(reads, k=32)
    ids = torch.tensor([[kmers[read[at : at + 7]][0] for at in range(92)] for read in batch])
    loss = nn.functional.cross_entropy(head(embed(ids).mean(1)), torch.randint(3, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not CURED:
        gc.collect()  # cause: gc-pauses
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
