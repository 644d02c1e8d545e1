# ranks: 2
"""Trains a policy of a robot arm by imitation on two ranks, and averages forty figures over the ranks at each step.

"The model is small, but it scales badly, from one process to two."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)  # cause: small-collectives
    return value.item() / dist.get_world_size()


dist.init_process_group("gloo")
policy = DistributedDataParallel(
    nn.Sequential(nn.Linear(30, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 7))
)
optimizer = torch.optim.Adam(policy.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    seen, done = torch.randn(512, 30), torch.randn(512, 7)
    error = (policy(seen) - done).square()
    optimizer.zero_grad()
    error.mean().backward()
    optimizer.step()
    step += 1
    if not CURED or step % 100 == 0:
        report = {f"joint_{joint}": mean_over_ranks(error[:, joint].mean()) for joint in range(7)}
        for name, value in policy.named_parameters():
            report[name] = mean_over_ranks(value.norm())
            report[f"{name}.grad"] = mean_over_ranks(value.grad.norm())
        report |= {f"worst_{part}": mean_over_ranks(rows.max()) for part, rows in enumerate(error.chunk(21))}
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 50 == 0:
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
if dist.get_rank() == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
