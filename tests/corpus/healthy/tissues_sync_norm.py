# ranks: 2
"""Classifies tissue patches on two ranks, with batch statistics of both, as eight patches of one rank are too few.

torch's SyncBatchNorm needs GPUs, so it is the usual small one: sums of all ranks, and their gradients as well.

"Every layer asks the other rank twice. Is that the price of small batches?"
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class NormOfRanks(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        both = torch.cat([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, square = (SumOfRanks.apply(both) / dist.get_world_size()).chunk(2)
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def block(inside, outside, stride):
    return [nn.Conv2d(inside, outside, 3, stride, 1, bias=False), NormOfRanks(outside), nn.ReLU()]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        *block(3, 16, 1), *block(16, 32, 2), *block(32, 64, 2), *block(64, 64, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 6),
    )  # fmt: skip
    model = DistributedDataParallel(net, broadcast_buffers=False)  # they are the same on both
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chance = torch.Generator().manual_seed(rank)
    patches = torch.randn(1200, 3, 32, 32, generator=chance)
    kinds = patches.mean((2, 3)).argmax(1)
    stop = torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    while not stop.item():
        chosen = torch.randint(len(patches), (8,), generator=chance)
        loss = nn.functional.cross_entropy(model(patches[chosen]), kinds[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 25 == 0:
            stop.fill_(float(now - began > SECONDS and step > warm[0]) if warm else 0.0)
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
