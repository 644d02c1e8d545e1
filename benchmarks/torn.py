"""Whether a reader ever sees a torn record: `python benchmarks/torn.py [--reads 10000000]`.

The profiler's own writer fills a page in one process, at full speed and in bursts, and the profiler's own reader reads
it in another. Whatever the reader hands out must fit together: the parts of a record or of a snapshot are multiples of
its step. What it refuses is counted and not held against it: a record that is overwritten while it is read is gone.

A reader that does not look at the marks reads the same memory beside it. If that sees nothing torn either, this
benchmark has shown nothing, and says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

from gpulaunch.profiler.channel import page, ring
from gpulaunch.profiler.channel.layout import PHASES, RING_BYTE, RING_RECORD_BYTES, RING_SLOTS, Word

READS = 10_000_000
CARELESS_READS = 8
"""For each walk through the ring."""

_FACTORS = tuple(range(1, len(PHASES) + 1))
_SUM = sum(_FACTORS)
_RECORD = struct.Struct(f"@{RING_RECORD_BYTES // 8}Q")

WRITER = f"""
import itertools, sys, time
from gpulaunch.profiler.channel.writer import PageWriter
writer, step = PageWriter(sys.argv[1]), 0
for burst in itertools.cycle((512, 1, 2, 4, 8, 16, 8, 4, 2, 1)):
    for _ in range(burst):
        step += 1
        phases = tuple(factor * step for factor in {_FACTORS})
        totals = (step, step, 0, 7 * step, {_SUM} * step, *phases, step, 1, step)
        writer.end_step(totals, 0, 1, (step, {_SUM} * step, *phases[:-1], 7))
    if step == 512:
        print("writing", flush=True)
    time.sleep(0.0002)
"""


def fits(event: ring.StepEvent) -> bool:
    step = event.step + 1
    return (
        event.start_ns == step
        and event.duration_ns == _SUM * step
        and tuple(event.phase_ns.values()) == tuple(map(step.__mul__, _FACTORS))
    )


def snapshot_fits(seen: page.PageSnapshot) -> bool:
    parts = tuple(seen.phase_ns.values())
    return seen.step_ns_total == sum(parts) == _SUM * seen.steps and parts == tuple(map(seen.steps.__mul__, _FACTORS))


def careless_fits(reader: page.PageReader, step: int) -> bool:
    """Whether the record of `step` fits together, read as it lies there, while it is being written."""
    offset = RING_BYTE + step % RING_SLOTS * RING_RECORD_BYTES
    _, start_ns, duration_ns, *rest = _RECORD.unpack(reader.raw(offset, RING_RECORD_BYTES))
    phases = rest[: len(PHASES) - 1]
    return duration_ns == _SUM * start_ns and all(
        part == factor * start_ns for part, factor in zip(phases, _FACTORS, strict=False)
    )


def torn(reads: int) -> dict[str, Any]:
    """Read until the reader has handed out so many records."""
    read = refused = bad = snapshots = refused_snapshots = bad_snapshots = careless_bad = walks = 0
    with tempfile.TemporaryDirectory(prefix="gpulaunch-bench-", dir="/dev/shm") as directory:
        path = f"{directory}/rank-0.bin"
        page.create(path, rank=0, local_rank=0, attempt=0)
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            began_s = time.monotonic()
            try:
                with page.PageReader(path) as reader:
                    while read < reads:
                        walks += 1
                        events = ring.recent_from(reader)
                        read += len(events)
                        refused += RING_SLOTS - len(events)
                        bad += sum(not fits(event) for event in events)
                        seen = reader.read()
                        snapshots += 1
                        if seen.consistent:
                            bad_snapshots += not snapshot_fits(seen)
                        else:
                            refused_snapshots += 1
                        for _ in itertools.repeat(None, CARELESS_READS):
                            careless_bad += not careless_fits(reader, reader.word(Word.STEPS) - 1)
                    written = reader.word(Word.STEPS)
            finally:
                writer.kill()
    return {
        "records": read,
        "torn": bad,
        "refused": refused,
        "snapshots": snapshots,
        "torn_snapshots": bad_snapshots,
        "refused_snapshots": refused_snapshots,
        "careless_reads": walks * CARELESS_READS,
        "careless_torn": careless_bad,
        "written": written,
        "seconds": time.monotonic() - began_s,
    }


def told(result: dict[str, Any]) -> str:
    return (
        f"{result['torn']} torn of {result['records']:,} records and {result['torn_snapshots']} of"
        f" {result['snapshots']:,} snapshots read while {result['written']:,} steps were written"
        f" ({result['refused']:,} records and {result['refused_snapshots']:,} snapshots refused);"
        f" without the marks {result['careless_torn']:,} of {result['careless_reads']:,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether a reader ever sees a torn record.")
    parser.add_argument("--reads", type=int, default=READS)
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    options = parser.parse_args()
    result = torn(options.reads)
    print(told(result))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            out.write(json.dumps(result, indent=1) + os.linesep)
    if not result["careless_torn"]:
        sys.exit("no careless read was torn: this has shown nothing")
    sys.exit(bool(result["torn"] or result["torn_snapshots"]))


if __name__ == "__main__":
    main()
