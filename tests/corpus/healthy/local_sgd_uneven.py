"""Local SGD on graphs of random size: steps are uneven between the ranks, but they meet only every 50 steps.
Author's remark: "a big graph here, a big graph there, it evens out before we average"."""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SECONDS = float(os.environ.get("SECONDS", "22"))
PERIOD = 50


class Mean(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.own, self.other = nn.Linear(a, b), nn.Linear(a, b)

    def forward(self, x, src, dst):
        near = torch.zeros_like(x).index_add_(0, dst, x[src])
        return torch.relu(self.own(x) + self.other(near / 6))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mean(32, 128), Mean(128, 128), Mean(128, 128)])
        self.out = nn.Linear(128, 2)

    def forward(self, x, src, dst):
        for layer in self.layers:
            x = layer(x, src, dst)
        return self.out(x.mean(0, keepdim=True))


def graph(g):
    n = int(torch.randint(500, 1500, (1,), generator=g))
    src, dst = torch.randint(0, n, (2, 6 * n), generator=g)
    x = torch.randn(n, 32, generator=g)
    return x, src, dst, (x[:, 0].mean() > 0).long().view(1)


def average(net):
    flat = parameters_to_vector(net.parameters()).detach()
    dist.all_reduce(flat)
    vector_to_parameters(flat / dist.get_world_size(), net.parameters())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(31 + rank)
    t0, warm, steps = time.perf_counter(), None, 0
    vote = torch.zeros(1)
    while not vote.item():
        for _ in range(PERIOD):
            *inputs, label = graph(g)
            loss = nn.functional.cross_entropy(net(*inputs), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        steps += PERIOD
        average(net)
        now = time.perf_counter()
        if warm is None and now - t0 > 2:
            warm = (now, steps)
        vote.fill_(float(now - t0 > SECONDS and steps > warm[1]))
        dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"step_ms {(time.perf_counter() - warm[0]) / (steps - warm[1]) * 1e3:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
