"""What the programs beside this share: a small training loop that takes its time, and times itself.

The program's own clock is what predictions are compared with: it knows nothing of gpulaunch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

WARM_UP_STEPS = 20


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repaired", action="store_true", help="without the fault")
    parser.add_argument("--seconds", type=float, default=24.0, help="how long to train")
    parser.add_argument("--faster", type=float, default=1.0, help="have all take so many times less, where it is read")
    return parser.parse_args()


class Training:
    """A model of a few numbers, its optimizer, and a stopwatch."""

    def __init__(self, *, compute_s: float = 0.02, model: nn.Module | None = None, threads: int | None = 1) -> None:
        if threads is not None:  # the arithmetic is nothing; threads that wait for each other would be noise
            torch.set_num_threads(threads)
        self.compute_s = compute_s
        self.model = nn.Linear(8, 8) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.steps = 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """One step; like one on a GPU it takes its time without using the CPU."""
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        time.sleep(self.compute_s)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss

    def run(
        self,
        batches: Iterable[torch.Tensor],
        *,
        seconds: float,
        after: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Train for so long, epoch after epoch, and print what a step took. Ranks stop after the same step."""
        began_s = timed_s = time.monotonic()
        is_over = False
        while not is_over:
            for x in batches:
                loss = self.step(x)
                if after is not None:
                    after(self.steps, loss)
                if self.steps == WARM_UP_STEPS:
                    timed_s = time.monotonic()
                if self.steps % WARM_UP_STEPS == 0 and (is_over := longest(time.monotonic() - began_s) >= seconds):
                    break
        step_s = (time.monotonic() - timed_s) / max(1, self.steps - WARM_UP_STEPS)
        print(f"rank {os.environ.get('RANK', '0')} step_ms {1e3 * step_s:.4f}", flush=True)


def longest(seconds: float) -> float:
    """The most that a rank gives."""
    if not dist.is_initialized():
        return seconds
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()
