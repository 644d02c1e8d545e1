# ranks: 2
"""Classifies strokes of rowers with sharpness-aware minimization, under DistributedDataParallel.

"The second pass starts where the averaged gradients of the first one lead, so both are reduced."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))


class SAM:
    def __init__(self, optimizer, rho=0.05):
        self.optimizer, self.rho, self.moved = optimizer, rho, []
        self.params = [p for group in optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def ascend(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm() + 1e-12
        self.moved = [p.grad * (self.rho / norm) for p in self.params]
        for p, e in zip(self.params, self.moved, strict=True):
            p.add_(e)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.moved, strict=True):
            p.sub_(e)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(12 * 50, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 6)
    )
    model = DistributedDataParallel(net)
    sam = SAM(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    strokes = torch.randn(4096, 12, 50)
    kinds = strokes[:, :6].abs().sum(-1).argmax(-1)
    step, began, warm = 0, time.perf_counter(), None
    stop = torch.zeros(1)
    while not stop.item():
        some = torch.randint(0, 4096, (192,))
        x, y = strokes[some], kinds[some]
        nn.functional.cross_entropy(model(x), y).backward()
        sam.ascend()
        nn.functional.cross_entropy(model(x), y).backward()
        sam.descend()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            stop.fill_(now - began > SECONDS)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
