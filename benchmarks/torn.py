"""Whether a reader ever sees a torn record: `python benchmarks/torn.py [--reads 10000000]`.

The profiler's own writer fills a page in one process, at full speed and in bursts, as a rank does: eight plain steps at
once, then one that has every phase. The profiler's own reader reads it in another. Whatever the reader hands out must
fit together: the parts of a record are multiples of its step, those of a snapshot of the last step that had them. What
it refuses is counted and not held against it: a record that is overwritten while it is read is gone.

A reader that does not look at the marks reads the same memory beside it. If that sees nothing torn either, this
benchmark has shown nothing, and says so.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from gpulaunch.profiler.channel import ring, segment, segment_writer
from gpulaunch.profiler.channel.layout import PHASES, RING_BYTE, RING_RECORD_BYTES, RING_SLOTS, Word

READS = 10_000_000
CARELESS_READS = 8
"""For each walk through the ring."""

FACTORS = tuple(range(1, len(PHASES) + 1))
FACTORS_SUM = sum(FACTORS)
_NOW_AND_THEN = tuple(PHASES.index(phase) for phase in ("h2d", "sync", "checkpoint", "compile", "gc", "validation"))
_COMM = PHASES.index("comm")
_PLAIN_STEPS = 8
"""As many as a rank publishes together; the step after them has every phase."""
_RECORD = struct.Struct(f"@{RING_RECORD_BYTES // 8}Q")

WRITER = f"""
import itertools, sys, time
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
writer, step = SegmentWriter(sys.argv[1]), 0
totals = [0] * {len(PHASES)}

def next_record(every_phase):
    # A part that a plain step has is a multiple of the step; so is each total, of the last step that had the part.
    global step
    step += 1
    parts = [factor * step for factor in {FACTORS}]
    if not every_phase:
        for phase in {_NOW_AND_THEN} if step % 2 else {(_COMM, *_NOW_AND_THEN)}:
            parts[phase] = 0
    totals[:] = [part or total for part, total in zip(parts, totals)]
    return step, sum(parts), *parts[:-1], 7

def now():
    return step, step, 0, 7 * step, sum(totals), *totals, step, 1, step

for turns in itertools.cycle((64, 1, 1, 2, 4, 2, 1, 1)):
    for _ in range(turns):
        records = [next_record(False) for _ in range({_PLAIN_STEPS})]
        writer.end_plain_steps(now(), [0] * {_PLAIN_STEPS}, records)
        record = next_record(True)
        writer.end_step(now(), 0, 1, record)
    if step == 64 * {_PLAIN_STEPS + 1}:
        print("writing", flush=True)
    time.sleep(0.0002)
"""


def parts_fit(step: int, parts: Sequence[int]) -> bool:
    """Whether these are the parts of that step: each is a multiple of it, and some are not there in a plain one."""
    whole = tuple(factor * step for factor in FACTORS)
    plain = tuple(0 if phase in _NOW_AND_THEN else part for phase, part in enumerate(whole))
    alone = tuple(0 if phase == _COMM else part for phase, part in enumerate(plain))
    return tuple(parts) in (whole, plain, alone)


def fits(event: ring.StepEvent) -> bool:
    step = event.step + 1
    return event.start_ns == step and parts_fit(step, tuple(event.phase_ns.values()))


def snapshot_fits(seen: segment.SegmentSnapshot) -> bool:
    parts = tuple(seen.phase_ns.values())
    last = [part // factor for part, factor in zip(parts, FACTORS, strict=True)]
    often = {step for phase, step in enumerate(last) if phase != _COMM and phase not in _NOW_AND_THEN}
    rarely = {last[phase] for phase in _NOW_AND_THEN}
    return (
        seen.step_ns_total == sum(parts)
        and parts == tuple(map(operator.mul, last, FACTORS))
        and often == {seen.steps}
        and seen.steps - last[_COMM] in (0, 1)
        and len(rarely) == 1
        and 0 <= seen.steps - min(rarely) <= _PLAIN_STEPS
    )


def careless_fits(reader: segment.SegmentReader, step: int) -> bool:
    """Whether the record in the place of `step` fits together, read as it lies there, while it is being written."""
    offset = RING_BYTE + step % RING_SLOTS * RING_RECORD_BYTES
    _, start_ns, duration_ns, *rest = _RECORD.unpack(reader.raw(offset, RING_RECORD_BYTES))
    phases = rest[: len(PHASES) - 1]
    return parts_fit(start_ns, (*phases, duration_ns - sum(phases)))


def torn(reads: int) -> dict[str, Any]:
    """Read until the reader has handed out so many records."""
    read = refused = bad = snapshots = refused_snapshots = bad_snapshots = careless_bad = walks = 0
    with tempfile.TemporaryDirectory(prefix="gpulaunch-bench-", dir="/dev/shm") as directory:
        path = f"{directory}/rank-0.bin"
        segment_writer.create(path, rank=0, local_rank=0, attempt=0)
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            began_s = time.monotonic()
            try:
                with segment.SegmentReader(path) as reader:
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
                        for turn in range(CARELESS_READS):  # steps are written before they are counted, or after
                            careless_bad += not careless_fits(reader, reader.word(Word.STEPS) - turn % 2)
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
        f"torn: {result['torn']} of {result['records']:,} records and {result['torn_snapshots']} of"
        f" {result['snapshots']:,} snapshots, read while {result['written']:,} steps were written"
        f" ({result['refused']:,} records and {result['refused_snapshots']:,} snapshots were rejected);"
        f" without the guards {result['careless_torn']:,} of {result['careless_reads']:,}"
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
