"""Prometheus finds a job of Slurm: the variables that `gpulaunch init slurm` names, exported before sbatch, reach every
node."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.cli import init

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

WAITS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""


def targets(directory: Path) -> list[dict[str, Any]]:
    """What Prometheus would read there now."""
    return [group for path in sorted(directory.glob("*.json")) for group in json.loads(path.read_text())]


def test_both_nodes_are_announced_under_the_job_until_it_ends(slurm, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(WAITS)
    shared, stop = tmp_path / "targets", tmp_path / "stop"
    shared.mkdir()
    script = tmp_path / "job.sbatch"
    size = ("--nodes", "2", "--gpus", "2", "--cpus", "4", "--time", "30")
    assert init.run(["slurm", *size, "--out", str(script), str(tmp_path / "wait.py"), str(stop)]) == 0
    job = slurm.submit(
        script,
        tmp_path / "job",
        env={"NPROC": "1", "GPULAUNCH_METRICS_SD": str(shared), "GPULAUNCH_METRICS_ADDR": "127.0.0.1"},
    )
    try:
        slurm.wait_until(lambda: len(targets(shared)) == 2, "two nodes were not announced", job)
        groups = targets(shared)
        assert [group["labels"]["run"] for group in groups] == [job.id] * 2
        assert [group["labels"]["name"] for group in groups] == ["wait"] * 2
        addresses = {address for group in groups for address in group["targets"]}
        assert len(addresses) == 2
        node_ranks: set[str] = set()
        for address in addresses:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
                lines = page.read().decode().splitlines()
            (info,) = [line for line in lines if line.startswith("gpulaunch_run_info{")]
            node_ranks |= {each for each in ('node_rank="0"', 'node_rank="1"') if each in info}
        assert len(node_ranks) == 2
    finally:
        stop.touch()

    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)
    assert (slurm.field(job, "JobState"), slurm.field(job, "ExitCode")) == ("COMPLETED", "0:0"), job.output
    assert targets(shared) == []
