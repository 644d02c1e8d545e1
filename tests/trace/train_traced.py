"""Trains with DDP on two CPUs until it is told to end: a file `stop` beside it. Words on its command line:

fork      in the end there is a child that does not exec, and ends as a Python program ends
profiled  it has used torch's profiler itself
slow      its steps take a quarter of a second
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
if "profiled" in sys.argv:
    with torch.profiler.profile():
        torch.ones(3).sum()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(512, 256), torch.randint(0, 8, (512,))), batch_size=64)
loss_of = nn.CrossEntropyLoss()
going = torch.ones(1)
ended_s = []
while going.item():
    for inputs, targets in loader:
        with torch.profiler.record_function(f"step {len(ended_s)}"):  # the program's own number, for who reads a trace
            loss = loss_of(model(inputs), targets)
            time.sleep(0.5 if "slow" in sys.argv else 0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ended_s.append(time.monotonic())
    going.fill_(0.0 if os.path.exists("stop") else 1.0)
    torch.distributed.all_reduce(going, op=torch.distributed.ReduceOp.MIN)
    if len(ended_s) == 8:
        print(f"training with {resident_bytes()} bytes", flush=True)
if "fork" in sys.argv:
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(ended_s))
print(f"trained {len(ended_s)} steps of {step_s} s", flush=True)
