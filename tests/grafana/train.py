"""A training program that does badly when it is told to, by files in its directory. Not a test.

    slow-loader    its dataset takes 30 ms longer for a sample
    slow-rank      rank 1 works 30 ms longer by itself in every step

It saves a checkpoint every 50 steps, goes on from the newest, and ends when it is asked to.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from gpulaunch.checkpoint import Checkpoint

HERE = Path(os.environ["TRAINING_DIR"])
BATCH = 4
LATE_S = 0.03


class Numbers(Dataset[torch.Tensor]):
    """Random numbers, which may take their time."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % BATCH == 0 and (HERE / "slow-loader").exists():
            time.sleep(BATCH * LATE_S)
        return torch.full((64,), float(index % 7))


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data = Numbers()
    loader = DataLoader(
        data, batch_size=BATCH, sampler=DistributedSampler(data), num_workers=1, persistent_workers=True
    )
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    checkpoint = Checkpoint(model=model, optimizer=optimizer, every=50)
    checkpoint.resume()
    for _ in checkpoint.epochs(1_000_000):
        for batch in checkpoint.batches(loader):
            if dist.get_rank() == 1 and (HERE / "slow-rank").exists():
                time.sleep(LATE_S)
            time.sleep(0.005)  # the cores are others' too
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()


if __name__ == "__main__":
    main()
