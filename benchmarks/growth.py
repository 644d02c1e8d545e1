"""Whether the profiler makes a rank grow: `python benchmarks/growth.py [--steps 100000]`.

Two jobs of one rank each, side by side and without a pause between steps, one with the profiler and one without. What
counts is what a rank has in use in the second half of its looks, less what it had in the first half, beside the same of
the rank that is not observed: blocks of Python's allocator, bytes that malloc has given out, resident bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measure import Job, gpulaunch, job, notes_of, page_of
from _shape import EPOCH_STEPS, METERS

from gpulaunch.profiler.channel.segment import SegmentSnapshot

STEPS = 100_000
WARM_UP = 0.1
"""Of the looks, left out: caches fill, the allocator finds its size."""
EXACT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""malloc counts what lies in a thread's cache of free chunks as given out."""
PROFILED = gpulaunch("--profile-budget", "0", **EXACT)
"""Nothing is switched off, though these steps are so short that it is too dear for them."""
UNPROFILED = gpulaunch("--no-profile", **EXACT)


def grown(values: Sequence[int]) -> float:
    """The median of the second half less that of the first: one odd look is not growth."""
    settled = warm(values)
    half = len(settled) // 2
    return statistics.median(settled[-half:]) - statistics.median(settled[:half])


def warm(values: Sequence[int]) -> Sequence[int]:
    return values[int(len(values) * WARM_UP) :]


def growth(steps: int) -> dict[str, Any]:
    """Both jobs; what each has grown by, by each meter."""
    epochs = max(4, -(-steps // EPOCH_STEPS))
    arguments = ("--epochs", str(epochs))
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {
            name: stack.enter_context(job(launcher, 1, "growth_job.py", *arguments, restarts=0))
            for name, launcher in (("with", PROFILED), ("without", UNPROFILED))
        }
        told = {name: notes_of(one, 1, within_s=60 + steps / 100)[0] for name, one in jobs.items()}
        pages = {name: page_of(one["channel_dir"], 0) for name, one in told.items()}
    seen = pages["with"]
    assert seen is not None, "no probe saw the rank that should have one"
    assert seen.steps >= told["with"]["steps"] - 1, f"the probe saw {seen.steps} steps"
    assert pages["without"] is None, "a probe saw the rank that should be without one"
    return {
        "steps": epochs * EPOCH_STEPS,
        "live": live(seen),
        "seconds": time.monotonic() - began_s,
        **{name: {meter: grown(one[meter]) for meter in METERS} for name, one in told.items()},
        "apart": {meter: max(warm(of)) - min(warm(of)) for meter, of in told["without"].items() if meter in METERS},
        "looks": {name: {meter: one[meter] for meter in METERS} for name, one in told.items()},
    }


def live(seen: SegmentSnapshot) -> dict[str, Any]:
    """What the rank itself has found that it costs to be observed."""
    return {
        "step_us": seen.step_ns_total / seen.steps / 1e3,
        "own_us": seen.probe_ns_total / seen.steps / 1e3,
    }


def grows(result: dict[str, Any]) -> bool:
    """Whether the observed rank grows by more than the other does, and than looks at the other lie apart.

    By what is in use; resident bytes come in pages, and pages of files count when they are first touched.
    """
    return any(
        result["with"][meter] > result["without"][meter] + result["apart"][meter] for meter in ("blocks", "heap_bytes")
    )


def told(result: dict[str, Any]) -> str:
    parts = (
        f"{name} the profiler {of['blocks']:+.0f} Python blocks, {of['heap_bytes']:+,.0f} bytes from malloc,"
        f" {of['rss_bytes']:+,.0f} bytes resident"
        for name, of in ((name, result[name]) for name in ("with", "without"))
    )
    apart = f"{result['apart']['blocks']} blocks and {result['apart']['heap_bytes']:,} bytes"
    return f"growth over {result['steps']:,} steps: {'; '.join(parts)} (its readings vary by {apart})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether the profiler makes a rank grow.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    result = growth(options.steps)
    print(told(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(grows(result))


if __name__ == "__main__":
    main()
