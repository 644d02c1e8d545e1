"""A DDP script that simply runs to its end without destroying its process group: does the job exit 0?"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
for _ in range(3):
    model(torch.randn(4, 8)).mean().backward()
