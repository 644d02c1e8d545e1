"""One network for three kinds of measurements in a kelp forest, each rank draws its own kind for a batch.

A batch uses the head of its kind alone, so the other heads get no gradient and DDP has to be told
to look for them. Every 25 steps the ranks compare their losses.

"The manual warns that find_unused_parameters=True costs time. Do I pay for it?"
"""
# ranks: 2

import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = float(os.environ.get("SECONDS", "22"))
BATCH, STEPS, KINDS = 24, 96, {"light": 4, "height": 1, "growth": 7}


def connect():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29643")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def make_measurements(rank, count=1500):
    g = torch.Generator().manual_seed(20 + rank)
    data = {}
    for number, (kind, outputs) in enumerate(KINDS.items()):
        series = torch.randn(count, 6, STEPS, generator=g).cumsum(2) / 5
        mixing = torch.randn(6, outputs, generator=torch.Generator().manual_seed(number))
        data[kind] = series, torch.tanh(series.mean(2) @ mixing)
    return data


class KelpNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        layers, channels = [], 6
        for dilation in (1, 2, 4, 8):
            layers += [nn.Conv1d(channels, width, 3, padding=dilation, dilation=dilation), nn.GELU()]
            channels = width
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleDict(
            {k: nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, n)) for k, n in KINDS.items()}
        )

    def forward(self, series, kind):
        return self.heads[kind](self.trunk(series).mean(2))


def train(rank, world):
    torch.manual_seed(0)
    chance = random.Random(rank)
    data = make_measurements(rank)
    model = DDP(KelpNet(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shared = torch.zeros(2)
    step, mark, now, loss = 0, None, 0.0, torch.zeros(())
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if step % 25 == 0:
            # the mean loss, and whether rank 0 wants to stop
            shared[0], shared[1] = loss.detach(), float(rank == 0 and now >= SECONDS)
            dist.all_reduce(shared)
            if rank == 0 and step % 200 == 0:
                print(f"step {step} loss {shared[0].item() / world:.4f}")
            if shared[1].item():
                break
        kind = chance.choice(list(KINDS))
        series, targets = data[kind]
        rows = torch.randint(len(series), (BATCH,))
        loss = nn.functional.mse_loss(model(series[rows], kind), targets[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    if rank == 0:
        print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    rank, world = connect()
    train(rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
