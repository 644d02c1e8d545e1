"""docs/faults.md, made from the table of the tests: `python tests/faults/fault_page.py` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_rows import ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"

_HEAD = """\
# Faults

What happens to a job when something breaks. Each row is a test: the command in the last column makes the fault on
2 to 4 ranks of a small DDP program and checks what must hold. In every row, besides: no process, socket or file of the
job is left behind; a restarted job makes the same losses from the same samples, bit by bit, as one that was never
disturbed; and the time from the last step before the fault to the first one after it is at most three times what the
settings allow (`--failure-grace`, and what hang detection takes to be sure) plus the job's first start.

This page is made from the tests' table by `python tests/faults/fault_page.py`.

The exit code is what the job ends with; in brackets, with no restart left.

| fault | what must hold | what gpulaunch does | exit code | command |
|---|---|---|---|---|
"""
_TAIL = """
"needs root": the test mounts a small tmpfs, or makes a memory cgroup.

`python tests/faults/nemesis.py` makes random faults of these kinds, several to a job, and checks what must hold in any
order of them; the same seed makes the same faults. `gpulaunch chaos` makes them on a job of yours:
`gpulaunch chaos kill-rank 3` and `gpulaunch chaos help` for the rest.
"""


def page() -> str:
    """docs/faults.md."""
    lines = [_HEAD.rstrip("\n")]
    for row in ROWS:
        code = str(row.code) if row.cause in (None, row.code) else f"{row.code} ({row.cause})"
        root = "; needs root" if row.root else ""
        lines.append(f"| {row.fault} | {row.holds} | {row.does} | {code} | `{row.command}`{root} |")
    return "\n".join(lines) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{len(ROWS)} rows in {PAGE.relative_to(ROOT)}")
