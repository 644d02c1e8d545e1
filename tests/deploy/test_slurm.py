"""The scripts for Slurm: what each node's gpulaunch is told, by a toy srun. A real Slurm runs them in tests/slurm."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from gpulaunch.launcher.job import host_info
from gpulaunch.launcher.job.load import load

SHIPPED = Path(__file__).parents[2] / "deploy/slurm"
SRUN = """#!/bin/bash
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_PROCID=$node "$@" || exit
done
"""
GPULAUNCH = """#!/bin/bash
printf '%s\\0' "$@" >"told.$SLURM_PROCID"
"""


@pytest.mark.parametrize(("script", "nodes"), [("one-node.sbatch", 1), ("two-nodes.sbatch", 2)])
def test_the_run_has_the_number_of_the_job_on_every_node(
    script: str, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/prometheus.md and docs/slurm.md say: a requeued job keeps it, and so does its run."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("gpulaunch", GPULAUNCH)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_NNODES": str(nodes), "MASTER_ADDR": "host0", "NPROC": "2"}

    ended = subprocess.run(
        ["bash", SHIPPED / script, "train.py", "--lr", "0.1"], cwd=tmp_path, env=env, capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stderr
    monkeypatch.chdir(tmp_path)
    told = [(tmp_path / f"told.{node}").read_text().split("\0")[:-1] for node in range(nodes)]
    # As the comments say: exported before sbatch.
    exported = dict(re.findall(r"(GPULAUNCH_\w+)=(\S+)", (SHIPPED / script).read_text()))
    assert exported == {"GPULAUNCH_METRICS_SD": "/shared/targets", "GPULAUNCH_METRICS_ADDR": "0.0.0.0"}
    specs = [load(each, exported, host_info.look({})).spec for each in told]
    assert [spec.metrics_run for spec in specs] == ["4711"] * nodes
    assert [spec.node_rank for spec in specs] == list(range(nodes))
    assert [(spec.metrics_sd, spec.metrics_host) for spec in specs] == [("/shared/targets", "0.0.0.0")] * nodes
