"""Which launchers of a step are one job, and which are alone."""

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
srun --ntasks=2 bash -c 'launch --nnodes 1'; echo "APART $?"
srun --ntasks=2 bash -c 'launch --nnodes 3'; echo "MORE $?"
export SHELL=/bin/bash
script -qec "srun --ntasks=2 --pty bash -c 'if [ -t 0 ]; then launch; fi'" /dev/null < /dev/null; echo "PTY $?"
launch; echo "BATCH $?"
salloc --quiet --nodes=1 --ntasks=2 bash -c launch; echo "SALLOC $?"
"""
SAID = {
    "TWO": ["0 of 2", "1 of 2"],
    "ONE": ["0 of 2", "1 of 2"],
    "STANDALONE": ["0 of 1", "0 of 1"],
    "APART": ["0 of 1", "0 of 1"],
    "MORE": [],
    "PTY": ["0 of 1"],
    "BATCH": ["0 of 1"],
    "SALLOC": ["0 of 1"],
}


def test_tasks_are_one_job_unless_they_are_told_otherwise_or_alone(slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(BATCH)
    job = slurm.submit(tmp_path / "job.sh", tmp_path / "job", "--time=30", "--nodes=1", "--ntasks=2")
    (job.cwd / "hello.py").write_text("import os; print('HELLO', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)

    said: dict[str, list[str]] = {}
    rest = job.output
    for name in SAID:
        part, found, rest = rest.partition(f"{name} {2 if name == 'MORE' else 0}\n")
        assert found, f"{name}\n{job.output}"
        said[name] = sorted(re.findall(r"HELLO (\d of \d)", part))
        if name == "MORE":
            assert part.count("error: --nnodes: 3 nodes, but srun starts 2 tasks") == 2, part
    assert said == SAID, job.output


HETEROGENEOUS = """#!/bin/bash
srun --het-group=0,1 gpulaunch --no-profile --start-method spawn hello.py; echo "BOTH $?"
srun gpulaunch --no-profile --start-method spawn hello.py; echo "FIRST $?"
"""


def test_a_step_over_the_parts_of_a_heterogeneous_job_is_refused(slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(HETEROGENEOUS)
    job = slurm.submit(tmp_path / "job.sh", tmp_path / "job", "--time=30", "--ntasks=1", ":", "--ntasks=1")
    (job.cwd / "hello.py").write_text("import os; print('HELLO', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)

    both, _, first = job.output.partition("BOTH 2\n")
    assert both.count("error: a heterogeneous job of Slurm is not read from its variables: ") == 2, job.output
    assert "HELLO" not in both
    assert re.findall(r"HELLO .*|FIRST \d", first) == ["HELLO 0 of 1", "FIRST 0"], job.output
