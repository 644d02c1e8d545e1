"""To add a quantity is to declare it in one line and to measure it in one place: everything else follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_quantity_that_is_declared_in_one_line_is_everywhere(tmp_path: Path) -> None:
    """Costs a process and no torch. Three in the first attempt, four in the second."""
    program = Path(__file__).with_name("new_quantity.py")

    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "page": ['gpulaunch_made_up_events_total{rank="0"} 7.0'],
        "store": 7,
        "run.json": 7,
        "window": [4],
        "docs": ["| `gpulaunch_made_up_events_total` | counter | `rank` | Made up. |"],
    }
