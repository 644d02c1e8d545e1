"""The batch script of `gpulaunch init slurm`: what each node's gpulaunch is told, by a toy srun.

A real Slurm runs it in tests/slurm.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from gpulaunch.launcher.cli import init
from gpulaunch.launcher.job import host_info
from gpulaunch.launcher.job.load import load
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.rendezvous.auth import read_token

SHIPPED = Path(__file__).parents[2] / "deploy/slurm/train.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do echo "$1" >> srun.told; shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_PROCID=$node "$@" || exit
done
"""
GPULAUNCH = """#!/bin/bash
printf '%s\\0' "$@" >"told.$SLURM_PROCID"
"""


def step(node: int, nodes: int) -> dict[str, str]:
    """What srun tells the task of a node."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_NUM_TASKS": f"{nodes}",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        "SLURM_PROCID": f"{node}",
        "SLURM_NODEID": f"{node}",
        "SLURM_LOCALID": "0",
    }


@pytest.mark.parametrize(
    ("words", "nodes", "least", "srun"), [([], 1, 1, []), ([], 2, 2, []), (["--min-nodes", "2"], 3, 2, ["--no-kill"])]
)
def test_all_nodes_are_one_run_with_the_number_of_the_job(
    words: list[str], nodes: int, least: int, srun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/prometheus.md and docs/slurm.md say: a requeued job keeps it, and so does its run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("gpulaunch", GPULAUNCH)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    assert init.run(["slurm", "--nodes", f"{nodes}", *words, "--out", "job.sh", "train.py", "--name", "a b"]) == 0
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_NNODES": str(nodes), "SLURM_CPUS_PER_TASK": "64", "NPROC": "2"}

    ended = subprocess.run(["bash", "job.sh", "--lr", "0.1"], env=env, capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
    told = [(tmp_path / f"told.{node}").read_text().split("\0")[:-1] for node in range(nodes)]
    # As the comments say: exported before sbatch.
    exported = dict(re.findall(r"(GPULAUNCH_\w+)=(\S+)", (tmp_path / "job.sh").read_text()))
    assert exported == {"GPULAUNCH_METRICS_SD": "/shared/targets", "GPULAUNCH_METRICS_ADDR": "0.0.0.0"}
    specs = [load(each, {**exported, **step(node, nodes)}, host_info.detect({})).spec for node, each in enumerate(told)]
    assert [spec.metrics_run for spec in specs] == ["4711"] * nodes
    assert [spec.node_rank for spec in specs] == list(range(nodes))
    assert [(spec.metrics_sd, spec.metrics_host) for spec in specs] == [("/shared/targets", "0.0.0.0")] * nodes
    assert [(spec.nnodes, spec.nproc, spec.job_dir) for spec in specs] == [(nodes, 2, "gpulaunch-runs/4711")] * nodes
    assert {spec.elastic.min_nodes for spec in specs if spec.elastic is not None} == ({least} if nodes > 1 else set())
    assert specs[0].program.args == ("--name", "a b", "--lr", "0.1")
    assert len(read_token(specs[0].token_file) or b"") >= 32
    assert (tmp_path / specs[0].token_file).stat().st_mode & 0o777 == 0o600
    assert ((tmp_path / "srun.told").read_text().split() if srun else []) == srun


def test_the_shipped_script_is_the_one_that_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert init.run(["slurm", "--nodes", "2", "train.py"]) == 0

    assert capsys.readouterr().out == SHIPPED.read_text()


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([], ["--nodes=1", "--gpus-per-node=8", "--cpus-per-task=64", "--time=24:00:00", "--requeue"]),
        (["--gpus", "0"], ["--nodes=1", "--cpus-per-task=8"]),
        (["--gpus", "4", "--cpus", "12", "--time", "2-12"], ["--gpus-per-node=4", "--cpus-per-task=12", "--time=2-12"]),
        (["--nodes", "4", "--min-nodes", "3"], ["--nodes=4", "--no-kill"]),
    ],
)
def test_the_size_is_as_asked_for(words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    init.run(["slurm", *words, "my train.py"])

    said = re.findall(r"^#SBATCH (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert set(lines) <= set(said)
    assert "--job-name=my_train" in said
    assert ("--gpus-per-node" in " ".join(said)) == ("0" not in words)
    assert ("--no-kill" in said) == ("--min-nodes" in words)


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("mine")

    with pytest.raises(UsageError, match="File exists"):
        init.run(["slurm", "--out", str(tmp_path / "job.sh"), "train.py"])

    assert (tmp_path / "job.sh").read_text() == "mine"


@pytest.mark.parametrize(
    "words", [["--nodes", "0"], ["--nodes", "2", "--min-nodes", "3"], ["--time", "soon"], ["--gpus", "-1"]]
)
def test_what_no_job_can_be_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"^init: "):
        init.run(["slurm", *words, "train.py"])
