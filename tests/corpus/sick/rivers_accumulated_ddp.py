"""Forecasts the levels of rivers from the gauges upstream on two ranks, and accumulates four parts of a batch per step.

The parts keep the memory low; the optimizer steps once for all of them.

"Accumulation was supposed to make the second machine worth it, as we would talk less often. With four parts per step a
step takes more than four times as long as one part alone in a single process."
"""

# ranks: 2
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
GAUGES, HOURS, AHEAD, PARTS, PART = 24, 32, 12, 4, 96


class Forecaster(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.read = nn.Sequential(nn.Flatten(), nn.Linear(GAUGES * HOURS, width), nn.GELU())
        self.middle = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.tell = nn.Linear(width, AHEAD)

    def forward(self, levels):
        seen = self.read(levels)
        return self.tell(seen + self.middle(seen))


class Valley:
    """Levels that are waves of a few periods; each gauge sees them a little later."""

    def __init__(self, rank):
        self.g = torch.Generator().manual_seed(40 + rank)
        self.hours = torch.arange(HOURS + AHEAD).float()
        self.delay = torch.linspace(0, 6, GAUGES)

    def part(self):
        period = 8 + 30 * torch.rand(PART, 1, 1, generator=self.g)
        phase = 6.3 * torch.rand(PART, 1, 1, generator=self.g)
        level = torch.sin((self.hours - self.delay[:, None]) / period + phase)
        past = level[:, :, :HOURS]
        return past + 0.05 * torch.randn(past.shape, generator=self.g), level[:, -1, HOURS:]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Forecaster())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    valley = Valley(rank)
    began, mark, step = time.perf_counter(), None, 0
    while True:
        optimizer.zero_grad()
        for part in range(PARTS):
            past, coming = valley.part()
            quiet = CURED and part < PARTS - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(past), coming) / PARTS
                loss.backward()  # cause: reduced-in-accumulation
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if step % 20 == 0:
            over = torch.tensor(float(now - began > SECONDS))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if rank == 0 and step % 100 == 0:
                print(f"{step}: loss {PARTS * loss.item():.4f}", flush=True)
            if over.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
