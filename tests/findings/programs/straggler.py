"""Rank 1 takes 20 ms longer than rank 0, and rank 0 waits for it. Repaired: it does not.

LATE_BY says at what: `compute` in its forward (it sleeps there), `input` (its dataset does), `gc` (it collects garbage
after every step), or `cpu`: both ranks compute for 20 ms, each on a core of its own, and rank 1 has to share it with
another process.
"""

import gc
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from pace import Training, arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LATE_S = 0.020
OTHER = "import time\nend_s = time.monotonic() + {}\nwhile time.monotonic() < end_s: pass"


class Model(nn.Module):
    def __init__(self, *, sleeps_s: float = 0.0, computes_s: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.sleeps_s = sleeps_s
        self.computes_s = computes_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleeps_s)
        end_s = time.thread_time() + self.computes_s
        while time.thread_time() < end_s:
            pass
        return self.linear(x)


class Samples(Dataset[torch.Tensor]):
    def __init__(self, late_s: float) -> None:
        self.late_s = late_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.late_s)
        return torch.rand(4, 8)


def collect(step: int, loss: torch.Tensor) -> None:
    """Once, if that takes so long here; else until it has."""
    end_s = time.monotonic() + LATE_S
    while time.monotonic() < end_s:
        gc.collect()


def share_a_core(rank: int, seconds: float, *, is_late: bool) -> None:
    """Have a core to oneself, or share it with a process that computes for so long."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    if is_late:
        subprocess.Popen([sys.executable, "-c", OTHER.format(seconds)])


if __name__ == "__main__":
    args = arguments()
    by = os.environ.get("LATE_BY", "compute")
    rank = int(os.environ["RANK"])
    late_s = LATE_S if rank == 1 and not args.repaired else 0.0
    if by == "cpu":
        share_a_core(rank, args.seconds, is_late=late_s > 0)
    dist.init_process_group("gloo")
    model = Model(sleeps_s=late_s if by == "compute" else 0.0, computes_s=LATE_S if by == "cpu" else 0.0)
    training = Training(model=DistributedDataParallel(model), compute_s=0.0 if by == "cpu" else 0.02)
    training.run(
        DataLoader(Samples(late_s), batch_size=None) if by == "input" else [torch.rand(4, 8) for _ in range(64)],
        seconds=args.seconds,
        after=collect if by == "gc" and late_s else None,
    )
    dist.destroy_process_group()
