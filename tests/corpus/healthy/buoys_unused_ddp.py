"""Finds buoys in sonar traces on two ranks; a batch without one has nothing for the second head to learn from.

"Do I pay for find_unused_parameters in all steps, although it is needed in one of fifty?"
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))


class Buoys(nn.Module):
    def __init__(self, width=48, depth=12):
        super().__init__()
        layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        self.trunk = nn.Sequential(nn.Linear(64, width), *layers)
        self.present, self.distance = nn.Linear(width, 1), nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))

    def forward(self, traces, distances):
        features = self.trunk(traces)
        there = distances > 0
        loss = nn.functional.binary_cross_entropy_with_logits(self.present(features)[:, 0], there.float())
        if there.any():
            loss = loss + nn.functional.smooth_l1_loss(self.distance(features[there])[:, 0], distances[there])
        return loss


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    traces = torch.randn(9_600, 64)
    distances = torch.where(torch.rand(9_600) < 0.12, traces[:, 0].abs() + 0.1, torch.zeros(9_600))
    data = TensorDataset(traces, distances)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Buoys(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    began, warm, step, epoch, done = time.perf_counter(), None, 0, 0, False
    while not done:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
        stop = torch.tensor([float(now - began > SECONDS)])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        done = bool(stop)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
