"""`srun` with several tasks is one job over all of them, from Slurm's variables alone."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

from gpulaunch.launcher.cli import init
from gpulaunch.launcher.job import slurm as variables

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

HELLO = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "SLURM_PROCID")
visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
print(os.environ["STEP"], *(os.environ[name] for name in names), os.uname().nodename,
      visible[int(os.environ["LOCAL_RANK"])] if visible != [""] else "-", flush=True)
"""
# A launcher's first line tells whether it is alone; `launch` without the profiler and without torch: it is fast.
SHAPES = """#!/bin/bash
launch() { export STEP=$1; shift; srun "$@" gpulaunch --no-profile --start-method spawn hello.py; }
launch two -N2 -n2 --gpus-per-node=0
launch gpus -N2 -n2 --gpus-per-node=2
launch uneven -N2 -n3 --gpus-per-node=0
launch shared -N1 -w n1 -n2 --gpus-per-node=2
launch bound -N1 -w n1 -n2 --gpus-per-task=1
launch second -N1 -n2 --nodelist=n2 --gpus-per-node=0
printf 'n2\\nn1\\nn2\\n' > hosts
SLURM_HOSTFILE=hosts launch arbitrary -n3 --distribution=arbitrary --gpus-per-node=0
"""


def test_every_shape_of_a_step_is_one_world(slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SHAPES)
    size = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2")
    job = slurm.submit(tmp_path / "job.sh", tmp_path / "job", "--time=30", *size)
    (job.cwd / "hello.py").write_text(HELLO)
    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)

    said: dict[str, list[str]] = {}
    for line in job.output.splitlines():
        found = re.search(r"(two|gpus|uneven|shared|bound|second|arbitrary) (\d+ .*)", line)
        if found:
            said.setdefault(found[1], []).append(found[2])
    said = {step: sorted(lines) for step, lines in said.items()}
    # RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, SLURM_PROCID, host, GPU.
    assert said == {
        "two": ["0 2 0 1 0 2 0 n1 -", "1 2 0 1 1 2 1 n2 -"],
        "gpus": ["0 4 0 2 0 2 0 n1 0", "1 4 1 2 0 2 0 n1 1", "2 4 0 2 1 2 1 n2 0", "3 4 1 2 1 2 1 n2 1"],
        "uneven": ["0 3 0 2 0 2 0 n1 -", "1 3 1 2 0 2 1 n1 -", "2 3 0 1 1 2 2 n2 -"],
        "shared": ["0 2 0 2 0 1 0 n1 0", "1 2 1 2 0 1 1 n1 1"],
        "bound": ["0 2 0 2 0 1 0 n1 0", "1 2 0 2 0 1 1 n1 1"],
        "second": ["0 2 0 2 0 1 0 n2 -", "1 2 1 2 0 1 1 n2 -"],
        "arbitrary": ["0 3 0 2 1 2 0 n2 -", "1 3 0 1 0 2 1 n1 -", "2 3 1 2 1 2 2 n2 -"],
    }, job.output
    assert (slurm.field(job, "JobState"), slurm.field(job, "ExitCode")) == ("COMPLETED", "0:0")
    runs = sorted(path.name for path in (job.cwd / "gpulaunch-runs").iterdir())
    assert runs == [f"hello-test-{job.id}.{step}" for step in range(7)]


DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
print("SUM", os.environ["STEP"], dist.get_rank(), total.item(), model.module.weight.grad.mean().item(), flush=True)
dist.destroy_process_group()
"""
DDP_JOB = """#!/bin/bash
STEP=nodes srun -N2 -n2 gpulaunch ddp.py
STEP=tasks srun -N1 -n2 gpulaunch ddp.py
"""


@pytest.mark.torch
def test_ddp_over_two_nodes_and_over_two_tasks_of_one(slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(DDP_JOB)
    job = slurm.submit(tmp_path / "job.sh", tmp_path / "job", "--time=30", "--nodes=2", "--ntasks-per-node=2")
    (job.cwd / "ddp.py").write_text(DDP)
    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)

    sums = sorted(re.findall(r"SUM (.*)", job.output))
    assert sums == ["nodes 0 3.0 0.5", "nodes 1 3.0 0.5", "tasks 0 3.0 0.5", "tasks 1 3.0 0.5"], job.output
    assert "WARNING: anyone who can connect to n1:" in job.output  # between hosts, without --token-file
    assert job.output.count("WARNING: anyone who can connect") == 1
    assert slurm.field(job, "JobState") == "COMPLETED"


ENDS = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("BEGAN", os.environ["STEP"], rank, attempt, flush=True)
began = "-".join(["began", os.environ["STEP"], attempt])
if rank == "0":
    open(began, "x").close()
for _ in range(1200):  # or rank 0 may be ended before it has said so
    if os.path.exists(began):
        break
    time.sleep(0.05)
if rank == "1" and (os.environ["STEP"] == "fails" or attempt == "0"):
    raise ValueError("no data")
if os.environ["STEP"] == "fails":
    time.sleep(300)
"""
ENDS_JOB = """#!/bin/bash
launch() { export STEP=$1; shift; srun -N2 -n2 gpulaunch --no-profile --start-method spawn "$@" ends.py; }
launch fails; echo "fails ends with $?"
launch restarts --max-restarts 1; echo "restarts ends with $?"
echo "and not by itself" > "$STEP.said"
"""


def test_a_failure_on_one_node_is_known_on_all_and_all_restart(slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(ENDS_JOB)
    job = slurm.submit(tmp_path / "job.sh", tmp_path / "job", "--time=30", "--nodes=2", "--ntasks-per-node=1")
    (job.cwd / "ends.py").write_text(ENDS)
    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)

    fails, _, restarts = job.output.partition("fails ends with 1\n")
    assert "ValueError: no data" in fails, job.output
    # Both tasks end with the code of the rank that failed.
    assert sorted(
        re.findall(r"task (\d): Exited with exit code 1", fails) or re.findall(r"tasks (0-1): Ex", fails)
    ) in (
        ["0", "1"],
        ["0-1"],
    ), fails
    assert "restarts ends with 0\n" in restarts, job.output
    began = sorted(re.findall(r"BEGAN restarts (\d) (\d)", restarts))
    assert began == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")], job.output


TWICE = """
import os
where = os.environ["GPULAUNCH_CHECKPOINT_DIR"].split(os.sep)[-2]
print("RUN", os.environ["SLURM_RESTART_COUNT"] if "SLURM_RESTART_COUNT" in os.environ else 0, os.environ["RANK"],
      os.environ["WORLD_SIZE"], where, os.environ["GPULAUNCH_ATTEMPT"], flush=True)
"""
TWICE_JOB = """#!/bin/bash
run="gpulaunch --no-profile --start-method spawn twice.py"
srun -N2 -n2 bash -c "$run; $run"
if [ -z "$SLURM_RESTART_COUNT" ]; then scontrol requeue "$SLURM_JOB_ID"; sleep 60; fi
"""


def test_runs_in_one_step_have_directories_of_their_own_and_find_them_after_a_requeue(slurm, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(TWICE_JOB)
    options = ("--time=30", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append")
    job = slurm.submit(tmp_path / "job.sh", tmp_path / "job", *options)
    (job.cwd / "twice.py").write_text(TWICE)
    slurm.wait_until(lambda: "RUN 0" in job.output, "it does not begin", job)
    slurm.start_again(job)
    slurm.wait_until(lambda: slurm.ended(job), "it does not end", job)

    runs = (f"twice-test-{job.id}.0", f"twice-test-{job.id}.0-1")
    assert sorted(re.findall(r"RUN (.*)", job.output)) == sorted(
        f"{start} {rank} 2 {run} {start}" for start in (0, 1) for rank in (0, 1) for run in runs
    ), job.output


TRAINS = """
import os, time
world = os.environ["WORLD_SIZE"]
print("BEGAN", os.environ["RANK"], "OF", world, "ON", os.uname().nodename, flush=True)
while world == "2" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    time.sleep(0.1)
"""
LOSES = """#!/bin/bash
srun {options} gpulaunch --no-profile --start-method spawn {words} trains.py
code=$?
echo "SRUN $code"
exit $code
"""


def begun(job) -> list[str]:
    return sorted(re.findall(r"^BEGAN (\d OF \d ON n\d)", job.output, re.MULTILINE))


def test_without_a_node_the_others_go_on_or_slurm_starts_the_job_again(slurm, tmp_path: Path) -> None:
    """With --no-kill and MIN:MAX in the same allocation, without in the next one."""
    outcomes: dict[str, str] = {}
    options = ("--time=30", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append")
    for name, no_kill, words in (("stays", ["--no-kill"], "--nnodes 1:2"), ("ends", [], "")):
        (tmp_path / f"{name}.sh").write_text(LOSES.format(options=" ".join(no_kill), words=words))
        job = slurm.submit(tmp_path / f"{name}.sh", tmp_path / name, *options, *no_kill)
        (job.cwd / "trains.py").write_text(TRAINS)
        slurm.wait_until(lambda job=job: begun(job) == ["0 OF 2 ON n1", "1 OF 2 ON n2"], "it does not begin", job)
        slurm.lose_node("n2")
        if name == "stays":
            slurm.wait_until(lambda job=job: slurm.ended(job), "it does not end", job)
            outcomes[name] = slurm.field(job, "JobState") + " " + slurm.field(job, "Restarts")
            slurm.repair_node("n2")
            assert begun(job)[0] == "0 OF 1 ON n1", job.output
            assert "node 1 (n2) is lost" in job.output, job.output
            assert "SRUN 0\n" in job.output
            continue
        slurm.repair_node("n2")
        slurm.start_again(job)
        slurm.wait_until(lambda job=job: slurm.ended(job), "it does not end", job)
        outcomes[name] = slurm.field(job, "JobState") + " " + slurm.field(job, "Restarts")
        assert begun(job) == ["0 OF 2 ON n1", "0 OF 2 ON n1", "1 OF 2 ON n2", "1 OF 2 ON n2"], job.output
        # In the same run directory: that of the job and the step.
        assert [path.name for path in (job.cwd / "gpulaunch-runs").iterdir()] == [f"trains-test-{job.id}.0"]

    assert outcomes == {"stays": "COMPLETED 0", "ends": "COMPLETED 1"}


@pytest.mark.parametrize(
    "words", [["--nodes", "2"], ["--nodes", "2", "--min-nodes", "1", "--time", "0-00:30"], ["--gpus", "0"]]
)
def test_sbatch_takes_what_init_writes(slurm, tmp_path: Path, words: list[str]) -> None:
    assert init.run(["slurm", "--cpus", "4", "--time", "30", *words, "--out", str(tmp_path / "job"), "train.py"]) == 0

    argv = ["sbatch", "--test-only", str(tmp_path / "job")]
    done = subprocess.run(argv, env=slurm.env, capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    nodes = "n[1-2]" if "--nodes" in words else "n1"
    assert re.search(rf"to start at .* on nodes? {re.escape(nodes)} in partition all", done.stderr), done.stderr


def test_lists_of_hosts_mean_what_slurm_says(slurm) -> None:
    texts = [random_list(random.Random(seed)) for seed in range(40)]

    for text in ("n1", "gpu[01-03,7],x1", "n[9-11]", "n[099-101]", *texts):
        said = subprocess.run(["scontrol", "show", "hostnames", text], env=slurm.env, capture_output=True, text=True)
        assert list(variables.expand(text)) == said.stdout.split(), f"{text} {said.stderr}"


def random_list(chance: random.Random) -> str:
    """A list of hosts as Slurm writes it: names with up to two numbers, of which it joins ranges."""

    def numbers() -> str:
        width = chance.randint(1, 4)
        ranges = [(low, low + chance.randint(0, 12)) for low in chance.sample(range(0, 120, 15), chance.randint(1, 4))]
        return ",".join(f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else "") for low, high in ranges)

    items: list[str] = []
    for _ in range(chance.randint(1, 4)):
        name = chance.choice(["gpu", "n", "rack-a"])
        if chance.random() < 0.3:
            name = f"{name}[{numbers()}]n"
        items.append(f"{name}[{numbers()}]")
    return ",".join(items)
