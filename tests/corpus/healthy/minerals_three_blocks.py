# ranks: 2
"""Trains a model of minerals with three equal blocks as a pipeline of two ranks, with four micro-batches.

Three blocks cannot be divided by two: one rank has two of them, whichever it is.

"The first rank is idle for a third of the time. With a fourth block it would be better used, but the model has three."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
WIDTH, ROWS, MICRO, KINDS, VOTE = 256, 32, 4, 30, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.inner(x)


def first_stage(stage, parts, passed):
    made, sent = [], []
    for part in parts:
        made.append(stage(part))
        sent.append(dist.isend(made[-1].detach(), 1))
    for hidden in made:
        dist.recv(passed, 1)
        hidden.backward(passed)
    for each in sent:
        each.wait()


def last_stage(stage, parts, passed):
    made, sent = [], []
    for kinds in parts:
        dist.recv(passed, 0)
        hidden = passed.clone().requires_grad_()
        loss = nn.functional.cross_entropy(stage(hidden), kinds) / MICRO
        loss.backward()
        made.append(hidden.grad)
        sent.append(dist.isend(hidden.grad, 0))
    for each in sent:
        each.wait()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = Block() if rank == 0 else nn.Sequential(Block(), Block(), nn.Linear(WIDTH, KINDS))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    minerals = torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(3))  # the same on both
    kinds = minerals[:, :KINDS].argmax(1)
    order = torch.Generator().manual_seed(4)
    passed = torch.empty(ROWS, WIDTH)
    stop = torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    while not stop.item():
        chosen = torch.randint(len(minerals), (MICRO, ROWS), generator=order)
        optimizer.zero_grad()
        if rank == 0:
            first_stage(stage, minerals[chosen], passed)
        else:
            last_stage(stage, kinds[chosen], passed)
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % VOTE == 0:
            stop.fill_(float(warm is not None and now - began > SECONDS and step > warm[0]))
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
