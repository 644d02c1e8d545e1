"""What a training program writes down about itself, by its own clock, to be held against what its page says.

The data that it trains and evaluates on take their time, so that their parts of a step have a size that is known.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

BATCH = 8
TRAINED, EVALUATED = 96, 24  # samples
READING_S = {"train": 0.003, "eval": 0.005}  # a batch


def lost_ns() -> int:
    """How long this thread has had to wait for a core until now, and how long the host had the cores (proc(5))."""
    with open("/proc/thread-self/schedstat") as schedstat, open("/proc/stat") as stat:
        queued_ns = int(schedstat.read().split()[1])
        return queued_ns + int(stat.readline().split()[8]) * 10**9 // os.sysconf("SC_CLK_TCK")


class Diary:
    """When what was done. It ends with the last step: a page has nothing of what comes after it."""

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self._stepped_ns = 0
        self._spans: list[tuple[str, int, int]] = []
        self._lost_ns: list[int] = []  # when it began, and at each step
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.optimizer_steps += 1
        self._stepped_ns = time.monotonic_ns()
        self._lost_ns.append(lost_ns())

    @contextlib.contextmanager
    def during(self, what: str) -> Generator[None]:
        """What is done in this block is this."""
        if not self._lost_ns:
            self._lost_ns.append(lost_ns())
        began_ns = time.monotonic_ns()
        yield
        self._spans.append((what, began_ns, time.monotonic_ns()))

    def told(self) -> dict[str, Any]:
        """How long it all took, and how long each kind of thing did, up to the last step."""
        began_ns = min((began_ns for _, began_ns, _ in self._spans), default=0)
        took = {"train": 0, "eval": 0, "evaluation": 0, "save": 0}
        for what, from_ns, to_ns in self._spans:
            if to_ns < self._stepped_ns:
                took[what] += to_ns - from_ns
        times = {"wall_ns": self._stepped_ns - began_ns, "lost_ns": self._lost_ns[-1] - self._lost_ns[0]}
        return {"optimizer_steps": self.optimizer_steps, "took_ns": took, **times}


class Data(Dataset[dict[str, torch.Tensor]]):
    """Samples for a small model that can learn nothing from them."""

    def __init__(self, diary: Diary, split: str) -> None:
        self.diary = diary
        self.split = split
        number = {"train": TRAINED, "eval": EVALUATED}[split]
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(number, 8, generator=random)
        self.labels = torch.randint(0, 3, (number,), generator=random)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index % BATCH == 0:  # one in a batch, or, where they are shuffled, as many as there are batches
            with self.diary.during(self.split):
                time.sleep(READING_S[self.split])
        return self.sample(index)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """One of them."""
        return {"inputs": self.inputs[index], "labels": self.labels[index]}
