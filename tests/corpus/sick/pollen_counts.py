"""Counts the kinds of pollen in a sample from its spectrum, on two machines' worth of ranks.

Four small batches make one step of the optimizer, the samples are long and do not fit otherwise.

"One rank alone makes a step in half of the time that two ranks need, for the same number of samples on each."
"""
# ranks: 2

import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BANDS, KINDS, MICRO, ACCUMULATE = 640, 40, 24, 4


def connect():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29641")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return dist.get_rank()


class Samples:
    """Spectra that are sums of the kinds' own spectra, made up front."""

    def __init__(self, rank, count=6000):
        g = torch.Generator().manual_seed(5)
        spectra = torch.rand(KINDS, BANDS, generator=g) ** 3
        g.manual_seed(100 + rank)
        self.counts = torch.poisson(torch.rand(count, KINDS, generator=g) * 2, generator=g)
        self.spectra = self.counts @ spectra + 0.1 * torch.randn(count, BANDS, generator=g)
        self.g = g

    def batch(self):
        rows = torch.randint(len(self.counts), (MICRO,), generator=self.g)
        return self.spectra[rows], self.counts[rows]


def make_model(width=640):
    return nn.Sequential(
        nn.Linear(BANDS, width), nn.GELU(),
        nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, KINDS), nn.Softplus(),
    )  # fmt: skip


def train(rank):
    torch.manual_seed(0)
    samples = Samples(rank)
    model = DDP(make_model())
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    stop = torch.zeros(1)
    step, mark, now = 0, None, 0.0
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if step % 20 == 0:  # the ranks have to agree about the end
            stop.fill_(now >= SECONDS)
            dist.broadcast(stop, 0)
            if stop.item():
                break
        opt.zero_grad()
        for part in range(ACCUMULATE):
            spectra, counts = samples.batch()
            last = part == ACCUMULATE - 1
            with model.no_sync() if CURED and not last else contextlib.nullcontext():
                loss = nn.functional.poisson_nll_loss(model(spectra), counts, log_input=False) / ACCUMULATE
                loss.backward()  # cause: reduced-in-accumulation
        opt.step()
        step += 1
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item() * ACCUMULATE:.4f}")
    if rank == 0:
        print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    rank = connect()
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
