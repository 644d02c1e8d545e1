# ranks: 2
"""Classifies statutes by their words on two ranks; ZeroRedundancyOptimizer divides the moments of Adam between them.

Nearly all of the model is the first weight, so one rank updates that and the other one the rest. Without it both would
update all: no step would be shorter, and each would need the memory.

"Rank 0 has twice the memory and is slower in step(). I thought ZeRO divides by two?"
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, AREAS = 8192, 20


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WORDS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, AREAS))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    chance = torch.Generator().manual_seed(rank)
    counts = torch.rand(1200, WORDS, generator=chance).pow(8)
    areas = counts[:, :AREAS].argmax(1)
    stop = torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    while not stop.item():
        chosen = torch.randint(len(counts), (24,), generator=chance)
        loss = nn.functional.cross_entropy(model(counts[chosen]), areas[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            stop.fill_(float(warm is not None and now - began > SECONDS and step > warm[0]))
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
