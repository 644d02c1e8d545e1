"""`srun` with several tasks, of which each would launch: refused, with lines that work; its healthy twins are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

# `script` gives the step that wants a terminal one; its shell is $SHELL, and only bash passes functions on.
BATCH = """#!/bin/bash
launch() { gpulaunch --no-profile --start-method spawn "$@" hello.py; }
export -f launch
srun --ntasks=2 bash -c launch; echo "TWO $?"
srun --ntasks=1 bash -c 'launch --nproc 2'; echo "ONE $?"
srun --ntasks=2 bash -c 'launch --standalone'; echo "STANDALONE $?"
export SHELL=/bin/bash
script -qec "srun --ntasks=2 --pty bash -c 'if [ -t 0 ]; then launch; fi'" /dev/null < /dev/null; echo "PTY $?"
launch; echo "BATCH $?"
"""


def test_two_tasks_without_nodes_are_refused_and_what_works_is_not(slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(BATCH)
    job = slurm.submit(tmp_path / "job.sh", tmp_path / "job", "--time=30", "--nodes=1", "--ntasks=2", "--exclusive")
    (job.cwd / "hello.py").write_text("import os; print('HELLO', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)

    parts: dict[str, str] = {}
    rest = job.output
    for name, code in (("TWO", 2), ("ONE", 0), ("STANDALONE", 0), ("PTY", 0), ("BATCH", 0)):
        parts[name], found, rest = rest.partition(f"{name} {code}\n")
        assert found, f"{name}\n{job.output}"
    assert "HELLO" not in parts["TWO"], job.output
    refusal = next(line for line in parts["TWO"].splitlines() if "srun starts 2 tasks" in line)
    assert "srun --ntasks=1 gpulaunch --nproc 2 hello.py" in refusal
    assert "--nnodes $SLURM_NNODES --node-rank $SLURM_NODEID" in refusal
    said = {name: sorted(re.findall(r"HELLO (\d) (\d)", part)) for name, part in parts.items()}
    assert said == {
        "TWO": [],
        "ONE": [("0", "2"), ("1", "2")],
        "STANDALONE": [("0", "1"), ("0", "1")],
        "PTY": [("0", "1")],
        "BATCH": [("0", "1")],
    }
