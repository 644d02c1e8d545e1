"""A small DDP program with everything that is random about training; it writes down what each step saw and gave.

killed_program.py CHECKPOINTS LOGS
"""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from gpulaunch.checkpoint import Checkpoint

EPOCHS, SAMPLES, BATCH = 8, 400, 4


class Numbered(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.linspace(0, 1, 16) * (index % 17)


def main() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(100 + rank)  # dropout of its own on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.9)
    data = Numbered()
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1, persistent_workers=True)

    ckpt = Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, every=7, keep=2, dir=sys.argv[1])
    ckpt.resume()
    with open(os.path.join(sys.argv[2], f"rank-{rank}"), "a", buffering=1, encoding="ascii") as log:
        log.write(f"pid {os.getpid()}\n")
        for _ in ckpt.epochs(EPOCHS):
            for indices, inputs in ckpt.batches(loader):
                noise = random.random() + float(np.random.rand())
                loss = nn.functional.mse_loss(model(inputs + noise), torch.rand(len(inputs), 4))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                log.write(f"{ckpt.steps_done + 1} {loss.item().hex()} {indices.tolist()}\n")
                ckpt.step()
        log.write("end\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
