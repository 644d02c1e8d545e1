"""A rank that is somebody else's: it opens its page, and is nobody from then on.

Not a test: `python nobodys_rank.py PAGE`; each line `step N` on stdin makes N steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bad_node import step

from gpulaunch.profiler.channel.segment_writer import SegmentWriter

NOBODY = 65534

if __name__ == "__main__":
    writer = SegmentWriter(sys.argv[1])
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print("ok", flush=True)
    for line in sys.stdin:
        step(writer, int(line.split()[1]))
        print("ok", flush=True)
