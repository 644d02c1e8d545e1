# ranks: 2
"""Fits the permeability of reservoirs with L-BFGS on two ranks, each of which has half of the wells.

The line search evaluates the loss of all wells several times in a step, so that both ranks must have the same loss and
the same gradient each time: else they would go different ways.

"One step reduces the gradients a dozen times!"
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
WELLS, VOTE = 768, 5


def truth(places):
    return torch.sin(3 * places[:, :1]) * torch.cos(2 * places[:, 1:2]) + 0.5 * places[:, 2:].square().sum(1, True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 192), nn.Tanh(), nn.Linear(192, 192), nn.Tanh(), nn.Linear(192, 192), nn.Tanh(), nn.Linear(192, 1)
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1.0, max_iter=10, history_size=10, tolerance_grad=0.0, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(20 + rank)
    began, warm, step = time.perf_counter(), None, 0
    vote = torch.zeros(1)
    while not vote.item():
        places = torch.rand(WELLS, 6, generator=generator) * 2 - 1  # other wells report in each step
        values = truth(places) + 0.05 * torch.randn(WELLS, 1, generator=generator)

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(places), values)  # noqa: B023
            loss.backward()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            return mean

        loss = optimizer.step(closure)
        step += 1
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {float(loss):.5f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % VOTE == 0:
            vote.fill_(float(now - began > SECONDS and step > warm[0]))
            dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
