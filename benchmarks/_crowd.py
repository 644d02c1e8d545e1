"""Simulated ranks: a process each that lies idle, and one that writes steps into all of their pages.

    python _crowd.py DIRECTORY FIRST COUNT HZ

A page has what that of a training rank has: steps and phases, a dataloader with a worker, a GPU's memory and times,
copies and syncs, checkpoints. Printed: one line of pids when all are there, and after a line on stdin the steps of
each, by rank, when the last one has been made. It ends when stdin does.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import time

from gpulaunch.profiler.channel import layout, segment_writer
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import COPY_WORDS, CheckpointState, GpuMemory, GpuTime, LoaderState, Pauses
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.channel.workers import WorkersWriter, claim, create

_MS = 1_000_000
_PARTS = (1, 0, 2, 3, 0, 1, 0, 0, 0, 0, 0, 3)
"""Of a step of 10 ms, by phase."""


def main(directory: str, first: int, count: int, hz: float) -> None:
    gc.freeze()
    ranks = range(first, first + count)
    ends, lives = os.pipe()
    pids = [_idle(directory, rank, ends, lives) for rank in ranks]
    writers = [_writer(directory, rank) for rank in ranks]
    print(*pids, flush=True)
    due_s = time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
        for writer in writers:
            _step(writer)
        due_s = max(due_s + 1 / hz, time.monotonic())
    sys.stdin.readline()
    made = {rank: writer.words[Word.STEPS] for rank, writer in zip(ranks, writers, strict=True)}
    print(json.dumps(made), flush=True)
    sys.stdin.read()


def _idle(directory: str, rank: int, ends: int, lives: int) -> int:
    path = f"{directory}/workers-{rank}.bin"
    create(path)
    pid = os.fork()
    if pid:
        return pid
    os.close(lives)
    claim(path)
    worker = WorkersWriter(path, parent_pid=os.getpid(), worker=0, knows=3)
    worker.add((1, 8, 3000, 1000, 1000, 1000, 0, 0, 0))
    os.read(ends, 1)  # until the one that has started it has ended
    os._exit(0)


def _writer(directory: str, rank: int) -> SegmentWriter:
    path = f"{directory}/rank-{rank}.bin"
    segment_writer.create(path, rank=rank, local_rank=rank, attempt=0)
    writer = SegmentWriter(path)
    words = writer.words
    words[CheckpointState.saves] = 3
    words[CheckpointState.bytes_total] = 3 << 30
    words[CheckpointState.stall_ns_total] = 400 * _MS
    words[CheckpointState.captured_ns] = time.monotonic_ns()
    words[Word.LISTENS] = 1
    for word in range(GpuMemory.allocated_bytes, GpuMemory.inactive_split_bytes + 1):
        words[word] = word << 26
    return writer


def _step(writer: SegmentWriter) -> None:
    words = writer.words
    words[LoaderState.batches] += 1
    words[LoaderState.batch_bytes_total] += 1 << 20
    words[LoaderState.wait_ns_total] += _MS
    words[Word.LOADER_WAIT_HISTOGRAM] += 1
    writer.write_queue((2, 4, 1 + words[LoaderState.batches] % 3, 0, 0))
    words[Pauses.gc_collections] += 1
    words[Pauses.gc_ns_total] += 12_345
    words[GpuMemory.allocated_bytes] ^= 1 << 20
    for timed in range(GpuTime.steps, GpuTime.optimizer_ns_total + 1):
        words[timed] += 1 if timed == GpuTime.steps else 1_234_567
    for copies in range(3):
        at = Word.COPY_FIRST + copies * COPY_WORDS
        words[at] += 1
        words[at + 1] += 1 << 16
        words[at + 2] += 54_321
        words[at + 3] += 43_210
    words[Word.SYNC_FIRST] += 1
    words[Word.SYNC_FIRST + 1] += 98_765

    steps, microsteps, skipped, samples, *_ = before = words[Word.STEPS : Word.PROBE_NS_TOTAL + 1]
    times = [total + part * _MS + 321 for total, part in zip(before[4:17], (10, *_PARTS), strict=True)]
    at_ns = time.monotonic_ns()
    counters = (steps + 1, microsteps + 1, skipped, samples + 32, *times, at_ns, layout.StepSource.OPTIMIZER)
    event = (at_ns - 10 * _MS, 10 * _MS, *(part * _MS for part in _PARTS[:-1]), 32)
    writer.end_step((*counters, before[-1] + 5000), 3, 1, event)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
