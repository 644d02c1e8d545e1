"""A rank without torch: writes its page through the probe's writer, and does what it is told, one line at a time.

`step N` makes N steps; `save N` commits a checkpoint of step N; `worker` starts a child that calls itself a dataloader
worker and uses some CPU; `end worker` kills it.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import CheckpointState
from gpulaunch.profiler.channel.segment_writer import SegmentWriter

MS = 1_000_000


def step(writer: SegmentWriter) -> None:
    steps, microsteps, skipped, samples, *_ = before = writer.words[Word.STEPS : Word.PROBE_NS_TOTAL + 1]
    parts = (1, 0, 2, 3, 0, 1, 0, 0, 0, 0, 0, 3)  # of 10 ms, by phase
    times = [total + part * MS for total, part in zip(before[4:17], (10, *parts), strict=True)]
    at_ns = time.monotonic_ns()
    counters = (steps + 1, microsteps + 1, skipped, samples + 32, *times, at_ns, layout.StepSource.OPTIMIZER)
    writer.end_step(
        (*counters, before[-1] + 5000), 3, 1, (at_ns - 10 * MS, 10 * MS, *(part * MS for part in parts[:-1]), 32)
    )


def save(writer: SegmentWriter, step: int) -> None:
    """As `probe.progress` tells it."""
    writer.words[CheckpointState.stall_ns_total] += 250 * MS
    writer.words[CheckpointState.bytes_total] += 1 << 20
    writer.words[CheckpointState.step] = step
    writer.words[CheckpointState.captured_ns] = time.monotonic_ns()
    writer.words[CheckpointState.saves] += 1


def start_worker() -> int:
    ready, done = os.pipe()
    lifeline, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        with open("/proc/self/comm", "w") as comm:
            comm.write("pt_data_worker")
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        os.write(done, b"x")
        os.read(lifeline, 1)  # until the rank is gone
        os._exit(0)
    os.close(lifeline)
    os.read(ready, 1)
    return pid


def main(path: str) -> None:
    writer = SegmentWriter(path)
    workers: list[int] = []
    print("ok", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["step", count]:
                for _ in range(int(count)):
                    step(writer)
            case ["save", count]:
                save(writer, int(count))
            case ["worker"]:
                workers.append(start_worker())
            case ["end", "worker"]:
                pid = workers.pop()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        print("ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
