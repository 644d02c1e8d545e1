"""The job of benchmarks/overhead.py: steps of a given length, and how many of them fit into a second.

A step is a batch from a dataloader with a worker process, a small model forward and backward, and a pause for the rest
of its length, as a rank pauses for its GPU. The pause is always as long, so whatever observing costs the rank makes the
step longer: no part of it hides behind a GPU that is busy anyway, as it does where a program runs ahead of its GPU.
The work is little, so that there is a core to run on: else the figure would say what contention costs. That is why
batches are arrays: to pass a batch of two tensors on through shared memory takes a rank and its worker more CPU time
than all else here. How busy the machine was is told too. Ranks do not wait for each other: else one figure would be the
slowest one's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _host import processor_s
from _shape import BATCH, SAMPLES
from torch.utils.data import DataLoader, Dataset


class Ready(Dataset[Any]):
    """Samples that are there already: a batch is two gathers, and no Python per sample."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 32).numpy()
        self.targets = torch.randint(0, 4, (SAMPLES,)).numpy()

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        return self.inputs[indices], self.targets[indices]


def observed(by_traceml: bool) -> Callable[[torch.nn.Module], contextlib.AbstractContextManager[object]]:
    """What a step is run inside of. TraceML's quick start asks for these two calls in a loop of one's own."""
    if not by_traceml:
        return lambda _: contextlib.nullcontext()
    import traceml_ai as traceml  # type: ignore[import-not-found]  # of an environment of its own

    traceml.init(mode="auto")
    return traceml.trace_step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("stop", type=Path)
    parser.add_argument("--pause-s", type=float, required=True)
    parser.add_argument("--settle-s", type=float, default=2.0, help="of steps that are not counted")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--traceml", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    step_of = observed(options.traceml)
    loader = DataLoader(Ready(), batch_size=BATCH, num_workers=1, persistent_workers=True, collate_fn=list)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = torch.nn.CrossEntropyLoss()

    steps_s: list[float] = []
    began_s = before_s = 0.0
    cpu_s = machine_s = stolen_s = 0.0
    started_s = time.monotonic()
    while True:
        for inputs, targets in loader:
            with step_of(model):
                optimizer.zero_grad()
                loss = loss_of(model(torch.from_numpy(inputs)), torch.from_numpy(targets))
                loss.backward()
                optimizer.step()
            time.sleep(options.pause_s)
            now_s = time.monotonic()
            if not began_s:
                if now_s - started_s >= options.settle_s:
                    cpu_s, (machine_s, stolen_s) = time.process_time(), processor_s()
                    began_s = before_s = time.monotonic()
                continue
            steps_s.append(now_s - before_s)
            before_s = now_s
            if now_s - began_s < options.seconds:
                continue
            machine_end_s, stolen_end_s = processor_s()
            seconds = now_s - began_s
            told = {
                "rank": int(os.environ["RANK"]),
                "channel_dir": os.environ.get("GPULAUNCH_CHANNEL_DIR", ""),
                "steps": len(steps_s),
                "seconds": seconds,
                "median_step_us": 1e6 * statistics.median(steps_s),
                "cpu_s": time.process_time() - cpu_s,
                "busy_cores": (machine_end_s - machine_s) / seconds,
                "stolen_cores": (stolen_end_s - stolen_s) / seconds,
            }
            with open(options.notes, "a") as notes:  # one write, so that lines of ranks do not mix
                notes.write(json.dumps(told) + "\n")
            while not options.stop.exists() and os.getppid() != 1:
                time.sleep(0.05)
            return


if __name__ == "__main__":
    main()
