# ranks: 2
"""Trains a model of proteins whose layers are on two ranks: the first has a part of them, the second one the rest.

The second one needs what the first one has computed, and gives its gradient back; neither has anything else to do
meanwhile. It would take as long if the layers were divided otherwise: at each time, one of the ranks computes.

"The first rank has fewer layers, as its machine has less memory."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
WIDTH, BATCH, KINDS, VOTE = 512, 192, 40, 10


def layers(count):
    return [each for _ in range(count) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(*layers(2)) if rank == 0 else nn.Sequential(*layers(6), nn.Linear(WIDTH, KINDS))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
    proteins = torch.randn(2000, WIDTH, generator=torch.Generator().manual_seed(5))  # the same on both
    kinds = proteins[:, :KINDS].argmax(1)
    order = torch.Generator().manual_seed(6)
    passed = torch.empty(BATCH, WIDTH)
    began, warm, step = time.perf_counter(), None, 0
    stop = torch.zeros(1)
    while not stop.item():
        chosen = torch.randint(len(proteins), (BATCH,), generator=order)
        optimizer.zero_grad()
        if rank == 0:
            hidden = stage(proteins[chosen])
            dist.send(hidden.detach(), 1)
            dist.recv(passed, 1)
            hidden.backward(passed)
        else:
            dist.recv(passed, 0)
            hidden = passed.clone().requires_grad_()
            loss = nn.functional.cross_entropy(stage(hidden), kinds[chosen])
            loss.backward()
            dist.send(hidden.grad, 0)
        optimizer.step()
        step += 1
        if rank == 1 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % VOTE == 0:
            stop.fill_(float(now - began > SECONDS and step > warm[0]))
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
