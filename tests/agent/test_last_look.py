"""At the end of a job the agent waits for its sidecar, which may be in the middle of a look into a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The command, on a machine so slow that a look into a rank takes it 2.5 seconds.
SLOW = """
import sys
from gpulaunch.launcher.agent import sidecar
from gpulaunch.launcher.cli.main import main

sidecar.ENTRY = '''
import itertools, time
from pathlib import Path
from gpulaunch.profiler.samplers import peek

look, number = peek.Peek.look, itertools.count(1)

def slow(self, pid):
    seen = look(self, pid)
    Path(f"look-{next(number)}").touch()
    time.sleep(2.5)
    return seen

peek.Peek.look = slow
''' + sidecar.ENTRY
sys.exit(main(sys.argv[1:]))
"""

# Ends while it is looked into for the second time.
TRAIN = """
import os, time

while not os.path.exists("look-2"):
    time.sleep(0.01)
"""


def test_a_look_that_is_under_way_at_the_end_is_in_the_report(census: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    env = {name: value for name, value in os.environ.items() if not name.startswith("GPULAUNCH_")}
    argv = ["--start-method", "spawn", "--job-dir", "run", "train.py"]
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "look-3").exists()
    stacks = (tmp_path / "run/stacks.folded").read_text().splitlines()
    assert sum(int(stack.rpartition(" ")[2]) for stack in stacks) == 2, stacks
