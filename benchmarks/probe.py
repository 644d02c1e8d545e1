"""What the probe costs a training step: on and off in one process, in alternating blocks, compared pair by pair.

    python benchmarks/probe.py [--steps 4000] [--json FILE]

The step is small on purpose (a two-layer network on the CPU, a fraction of a millisecond), so that the probe's
microseconds are not lost in it. The probe takes steps up in groups of eight, so the time of a step is that of such a
group, an eighth of it. A pair is one block with the probe and one without, in alternating order; the cost is the median
over the pairs of the difference of their median groups. The second case has dataloader workers, whose queue
is read too; its steps wait for another process and are noisy: look at the quartiles. In the third, one of sixteen
blocks of steps is observed, as it is where steps are too short for the budget; there means are compared. In the last,
no step is: the probe is switched off and its taps let everything pass, which is what it costs that Python is called at
all. "own figure" is what the page says: what the taps measure of themselves, and what it costs to call them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.workers import create as create_workers
from gpulaunch.profiler.probe.budget import BLOCK, MOST_BLOCKS
from gpulaunch.profiler.probe.hooks import Hooks
from gpulaunch.profiler.probe.state import Probe

GROUPS = 12
CASES = ((0, 1), (2, 1), (0, MOST_BLOCKS), (0, 0))
"""Workers, and of how many groups of steps one is observed; 0: none is."""
TARGET_US = 20.0


class Training:
    """A plain PyTorch loop that can be run for a while and gone on with."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(65536, 32), torch.randint(0, 4, (65536,)))
        self.loader = DataLoader(data, batch_size=16, num_workers=workers, persistent_workers=workers > 0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        self.loss = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batches = self._endless()

    def block(self, groups: int = GROUPS) -> list[float]:
        """The duration of a step in each of so many groups of steps, in microseconds."""
        durations_ns = []
        for _ in range(groups):
            start_ns = time.perf_counter_ns()
            for _ in range(BLOCK):
                inputs, targets = next(self.batches)
                loss = self.loss(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            durations_ns.append(time.perf_counter_ns() - start_ns)
        return [duration_ns / BLOCK / 1e3 for duration_ns in durations_ns]

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def measure(rank: int, workers: int, one_of: int, steps: int, directory: str) -> dict[str, Any]:
    """Alternate blocks of steps with and without the probe."""
    path = f"{directory}/rank-{rank}.bin"
    segment_writer.create(path, rank=rank, local_rank=0, attempt=0)
    create_workers(f"{directory}/workers-{rank}.bin")
    # Everything is in service, and stays so: half a percent of such a step nothing could be.
    os.environ.update(GPULAUNCH_CHANNEL_DIR=directory, RANK=str(rank), GPULAUNCH_PROFILE_BUDGET="0")
    writer = segment_writer.SegmentWriter(path)
    probe = Probe(writer, torch)
    hooks = Hooks(probe, torch)
    training = Training(workers)
    training.block()
    if one_of > 1:
        probe.unobserved.observe_one_of(one_of)
    if not one_of:
        probe.off()
    groups, typical = (2 * one_of, statistics.fmean) if one_of > 1 else (GROUPS, statistics.median)
    block_steps = groups * BLOCK

    on_us: list[float] = []
    off_us: list[float] = []
    for pair in range(max(1, steps // block_steps)):
        for with_probe in (True, False) if pair % 2 else (False, True):
            if with_probe:
                hooks.install()
                on_us.append(typical(training.block(groups)))
                hooks.remove()
            else:
                off_us.append(typical(training.block(groups)))
    differences = sorted(on - off for on, off in zip(on_us, off_us, strict=True))
    seen = segment.read(path)
    assert not seen.hooks_unavailable, seen.fault
    if one_of:
        missed = len(on_us) * block_steps - seen.steps
        assert missed <= len(on_us) + one_of * BLOCK, f"the probe saw only {seen.steps} steps"
        observed = seen.steps - seen.unobserved_steps
        assert observed * one_of <= 2 * seen.steps, f"the probe observed {observed} steps"
    else:
        assert not seen.steps, "it was not off"
    writer.close()
    return {
        "workers": workers,
        "observed_one_of": one_of,
        "steps": 2 * block_steps * len(on_us),
        "step_us_without": round(statistics.median(off_us), 2),
        "step_us_with": round(statistics.median(on_us), 2),
        "cost_us_per_step": round(statistics.median(differences), 2),
        "cost_us_quartiles": [round(q, 2) for q in statistics.quantiles(differences, n=4)[::2]],
        "self_priced_us_per_step": round(seen.probe_ns_total / max(1, seen.steps) / 1e3, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What the probe costs a training step.")
    parser.add_argument("--steps", type=int, default=4000, help="steps with the probe, and as many without (per case)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gpulaunch-bench-", dir=shm) as directory:
        cases = [measure(rank, *case, arguments.steps, directory) for rank, case in enumerate(CASES)]

    print(f"{'workers':>7} {'1 of':>4} {'steps':>7} {'without':>10} {'with':>10} {'cost':>9}", end="")
    print(f" {'quartiles':>17} {'own figure':>10}")
    for case in cases:
        low, high = case["cost_us_quartiles"]
        print(
            f"{case['workers']:>7} {case['observed_one_of']:>4} {case['steps']:>7}"
            f" {case['step_us_without']:>7.1f} us {case['step_us_with']:>7.1f} us {case['cost_us_per_step']:>6.2f} us"
            f" {low:>7.2f} .. {high:>6.2f} {case['self_priced_us_per_step']:>7.2f} us"
        )
    result = {
        "benchmark": "probe",
        "version": 1,
        "torch": torch.__version__,
        "target_us": TARGET_US,
        "target_met": cases[0]["cost_us_per_step"] <= TARGET_US,
        "cases": cases,
    }
    text = json.dumps(result)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
