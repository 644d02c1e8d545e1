# ranks: 2
# cause: straggler no-line
"""Trains a recurrent encoder of speech on two ranks; utterances are sorted by length and cut in two halves.

"Both ranks show the same step time, and yet rank 0 uses half the CPU of rank 1."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(40, 128, batch_first=True)
        self.out = nn.Linear(128, 50)

    def forward(self, speech):
        return self.out(self.rnn(speech)[0])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
chance = torch.Generator().manual_seed(9)
lengths = torch.randint(20, 160, (4096,), generator=chance).sort().values
if CURED:
    mine = lengths[rank::world]
else:
    mine = lengths[rank * 2048 : (rank + 1) * 2048]
model = DistributedDataParallel(Encoder())
optimizer = torch.optim.Adam(model.parameters())
began, warm, step = time.perf_counter(), None, 0
pick = torch.Generator().manual_seed(3)
while True:
    length = int(mine[torch.randint(2048, (1,), generator=pick)])
    speech = torch.rand(16, length, 40)
    loss = model(speech).square().mean()
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
if rank == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
