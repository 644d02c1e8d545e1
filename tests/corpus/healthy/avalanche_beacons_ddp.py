"""Detects avalanches in the records of beacons; two ranks unpack their share of a stream as they train on it.

"There is no worker process, so each rank decompresses its own records between the steps, and every tenth step the
ranks agree on a loss for the log. I am told that streams must have workers."
"""
# ranks: 2

import os
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CHANNELS, LENGTH, BATCH = 6, 128, 32


def records(count=1_600, seed=8):
    rng = np.random.default_rng(seed)
    packed = []
    for number in range(count):
        slide = number % 3 == 0
        shake = (30 + 20 * slide) * rng.standard_normal((CHANNELS, LENGTH), dtype=np.float32)
        packed.append((zlib.compress(shake.clip(-127, 127).astype(np.int8).tobytes(), 1), int(slide)))
    return packed


class Beacons(IterableDataset):
    def __init__(self, packed, rank, world):
        self.packed, self.rank, self.world = packed, rank, world

    def __iter__(self):
        rng = np.random.default_rng(0)
        while True:
            order = rng.permutation(len(self.packed))
            for number in order[self.rank :: self.world]:
                blob, slide = self.packed[number]
                shake = np.frombuffer(zlib.decompress(blob), dtype=np.int8).reshape(CHANNELS, LENGTH)
                yield torch.from_numpy(shake.astype(np.float32) / 64), slide


def detector():
    return nn.Sequential(
        nn.Conv1d(CHANNELS, 64, 7, padding=3), nn.ReLU(), nn.Conv1d(64, 96, 5, padding=2), nn.ReLU(),
        nn.Conv1d(96, 96, 5, padding=2), nn.ReLU(), nn.Conv1d(96, 96, 5, padding=2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(96, 2),
    )  # fmt: skip


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(Beacons(records(), rank, world), batch_size=BATCH)
    model = DistributedDataParallel(detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    began, warm, total = time.perf_counter(), None, torch.zeros(1)
    for step, (shakes, slides) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(shakes), slides)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 10 == 0:
            news = torch.tensor([total.item() / 10 / world, float(now - began > SECONDS)])
            dist.all_reduce(news)
            total.zero_()
            if rank == 0 and step % 100 == 0:
                print(f"step {step} loss {news[0].item():.4f}", flush=True)
            if news[1].item() > 0:
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
