"""So many ranks: a process each, which claims its page by the probe's own writer, makes 5 steps plus one for each rank
before it, and has a worker that has fetched one batch.

Not a test: `python crowd.py DIRECTORY COUNT` prints their pids when all are there, and ends them when stdin ends.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bad_node import step

from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.channel.workers import WorkersWriter, claim


def rank(directory: str, number: int, done: int) -> None:
    writer = SegmentWriter(f"{directory}/rank-{number}.bin")
    path = f"{directory}/workers-{number}.bin"
    claim(path)
    worker = WorkersWriter(path, parent_pid=os.getpid(), worker=0, knows=3)
    worker.add((1, 8, 3000, 1000, 1000, 1000, 0, 0, 0))
    step(writer, 5 + number)
    os.write(done, b"x")
    sys.stdin.read()  # until the one that started it ends


def main(directory: str, count: int) -> None:
    gc.freeze()
    ready, done = os.pipe()
    pids: list[int] = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            rank(directory, number, done)
            os._exit(0)
        pids.append(pid)
    for _ in range(count):
        os.read(ready, 1)
    print(*pids, flush=True)
    sys.stdin.read()
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
