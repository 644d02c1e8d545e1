# ranks: 2
# cause: straggler no-line
"""Trains a detector of damaged parcels on two ranks; each reads the half of the pictures that lies on its mount.

"Only the runs that get this one mount are slow."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Parcels(Dataset):
    def __init__(self, mount):
        self.latency = {"/local": 0.0005, "/far": 0.005}[mount]

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(self.latency)
        return torch.full((3, 24, 24), index % 5 / 5), index % 2


def main():
    dist.init_process_group("gloo")
    mount = "/far" if dist.get_rank() == 1 and not CURED else "/local"
    loader = DataLoader(Parcels(mount), batch_size=16, num_workers=1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 400, 2)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began, warm = time.perf_counter(), None
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 25 == 0:
            over = torch.tensor([float(now - began > SECONDS)])
            dist.all_reduce(over)
            if over.item():
                break
    if dist.get_rank() == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
