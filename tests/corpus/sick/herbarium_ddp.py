"""Names pressed plants of a herbarium with a small residual network on two ranks.

Each rank has batch statistics of its own; for the evaluation the running ones of all ranks are averaged.

"I left buffers out of DDP, as everyone says that they cost time, and now it is slower than before."
"""
# ranks: 2

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Residual(nn.Module):
    def __init__(self, width, wider, stride):
        super().__init__()
        self.conv_a = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.norm_a = nn.BatchNorm2d(wider)
        self.conv_b = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norm_b = nn.BatchNorm2d(wider)
        self.skip = nn.Identity()
        if stride > 1 or width != wider:
            self.skip = nn.Sequential(nn.Conv2d(width, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x):
        y = F.relu(self.norm_a(self.conv_a(x)))
        return F.relu(self.norm_b(self.conv_b(y)) + self.skip(x))


def network(kinds):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2), Residual(32, 32, 1),
        Residual(32, 48, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, kinds),
    )  # fmt: skip


def distribute_bn(model, world_size):
    """Averages the running statistics of the ranks."""
    for name, buffer in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer)  # cause: small-collectives
            buffer /= world_size


def plants(count, kinds, size, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = torch.rand(kinds, 3, size, size, generator=torch.Generator().manual_seed(99))
    names = torch.randint(kinds, (count,), generator=g)
    return 0.5 * shapes[names] + 0.5 * torch.rand(count, 3, size, size, generator=g), names


@torch.no_grad()
def accuracy(model, pictures, names):
    model.eval()
    right = (model(pictures).argmax(1) == names).float().mean()
    model.train()
    return right.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--size", type=int, default=40)
    parser.add_argument("--kinds", type=int, default=16)
    parser.add_argument("--eval-every", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(network(args.kinds), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    pictures, names = plants(1_200, args.kinds, args.size, seed=rank)
    held = plants(32, args.kinds, args.size, seed=50 + rank)
    order = torch.Generator().manual_seed(rank)
    began, warm, step, over = time.perf_counter(), None, 0, torch.zeros(1)
    while True:
        rows = torch.randint(len(names), (args.batch,), generator=order)
        loss = F.cross_entropy(model(pictures[rows]), names[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if not CURED or step % args.eval_every == 0:
            distribute_bn(model, world_size)
        if step % args.eval_every == 0:
            right = accuracy(model.module, *held)
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f} right {right:.3f}")
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            over.fill_(now - began > SECONDS)
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if over.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
