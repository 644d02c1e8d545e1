"""A small DDP job for benchmarks/launch.py: every rank notes when it steps for the first time, then steps on.

Nothing here knows which launcher started it. Arguments: a file to append notes to, and a file whose appearance ends
the job. A note is one line: attempt, rank, pid, monotonic seconds after the first optimizer step.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(notes: str, stop: str) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noted = False
    done = torch.zeros(1)
    while not done.item():
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        if not noted:
            noted = True
            line = f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {dist.get_rank()} {os.getpid()} {time.monotonic()}\n"
            fd = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(fd, line.encode())
            os.close(fd)
        # All ranks must agree on the last step; a pause keeps many ranks on few cores from starving the launcher.
        done.fill_(float(dist.get_rank() == 0 and os.path.exists(stop)))
        dist.all_reduce(done)
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
