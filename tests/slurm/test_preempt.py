"""Slurm gives notice and takes the machine away: what is saved, how the job ends, and that it goes on from there.

All jobs run at once, because Slurm looks at time limits every 30 s only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from gpulaunch.launcher.cli import init

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.timeout(600)]

# Saves when it is told to and not otherwise; ends by itself only when it has gone on from there.
TRAIN = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gpulaunch.checkpoint import Checkpoint

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = Checkpoint(model=model, optimizer=optimizer)
began = ckpt.resume() or 0
print("BEGAN", dist.get_rank(), "AT", began, flush=True)
for step in ckpt.steps(began + 3 if began else 10**9):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    if step == 3:
        print("STEPPING", flush=True)
    ckpt.step()
    time.sleep(0.02)
"""

SRUN = "exec srun gpulaunch --nproc 2 --job-dir run train.py"
PLAIN = "exec gpulaunch --nproc 2 --job-dir run train.py"
SIGNAL = "USR1@110"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to be told, and what Slurm then says of the job's first run."""

    script: str
    """A batch script, or the options of `gpulaunch init slurm` that writes one."""
    options: tuple[str, ...]
    told_by: str = "limit"
    """`limit`: the time limit comes near; `end`: it is reached; `scancel`."""
    state: str
    code: str
    """As Slurm gives it, code:signal; "" where it is the state's."""


WAYS: Mapping[str, Way] = {
    # Without B: every process of the step is sent the signal, ranks and helpers included.
    "init slurm, one node": Way(script="--nodes 1", options=(f"--signal={SIGNAL}",), state="PENDING", code=""),
    "init slurm, two nodes": Way(script="--nodes 2", options=(f"--signal={SIGNAL}",), state="PENDING", code=""),
    "srun, without B:": Way(script=SRUN, options=(f"--signal={SIGNAL}",), state="FAILED", code="75:0"),
    # With B: it is sent to the batch script's own process: here srun, which passes it on, or gpulaunch.
    "srun, with B:": Way(script=SRUN, options=(f"--signal=B:{SIGNAL}",), state="FAILED", code="75:0"),
    "plain, with B:": Way(script=PLAIN, options=(f"--signal=B:{SIGNAL}",), state="FAILED", code="75:0"),
    # Without a step nobody is sent anything; at the limit all processes get SIGTERM, and KillWait is left.
    "plain, without B:": Way(script=PLAIN, options=(f"--signal={SIGNAL}",), told_by="end", state="TIMEOUT", code=""),
    # With a step they get it twice within the second.
    "srun, at the limit": Way(script=SRUN, options=(), told_by="end", state="TIMEOUT", code=""),
    # The same SIGTERM: an operator, or another job that is worth more.
    "srun, scancel": Way(script=SRUN, options=(), told_by="scancel", state="CANCELLED", code=""),
}


@pytest.fixture(scope="module")
def jobs(slurm, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All of them, submitted, stepping, and told."""
    home = tmp_path_factory.mktemp("jobs")
    (home / "train.py").write_text(TRAIN)
    submitted = {}
    started_s: dict[str, float] = {}
    for name, way in WAYS.items():
        cwd = home / re.sub(r"\W+", "-", name)
        options = ("--time=30", "--open-mode=append", *way.options)
        script = home / f"{cwd.name}.sbatch"
        if way.script.startswith("-"):
            # As written, but for the signal: on the command line of sbatch it wins.
            size = (*way.script.split(), "--gpus", "2", "--cpus", "4")
            assert init.run(["slurm", *size, "--out", str(script), str(home / "train.py")]) == 0
        else:
            script.write_text(f"#!/bin/bash\n{way.script.replace('train.py', str(home / 'train.py'))}\n")
        submitted[name] = slurm.submit(script, cwd, *options, env={"NPROC": "2"})
        started_s[name] = time.monotonic()
    for name, job in submitted.items():
        if slurm.happens(lambda job=job: "STEPPING" in job.output, job):
            tell(slurm, WAYS[name], job, time.monotonic() - started_s[name])
    return submitted


def tell(slurm, way: Way, job, ran_s: float) -> None:
    """Have Slurm find that the time is over, or nearly so."""
    if way.told_by == "scancel":
        slurm.run("scancel", job.id)
    else:
        # Whole minutes from its start. One or two are left: the notice is due, and 30 s later at most it is sent.
        minutes = int(ran_s) // 60 + (1 if way.told_by == "end" else 2)
        slurm.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")


@pytest.mark.parametrize("name", WAYS)
def test_the_ranks_save_and_the_next_run_goes_on_from_there(slurm, jobs, name: str) -> None:
    way, job = WAYS[name], jobs[name]
    assert "STEPPING" in job.output, f"it never trained\n{job.output}"

    slurm.wait_until(lambda: slurm.field(job, "JobState") == way.state, f"it is not {way.state}", job)
    code = slurm.field(job, "ExitCode")
    first = job.output
    assert list(job.cwd.rglob("step-*/gpulaunch-manifest.json")), f"nothing was saved\n{first}"
    if way.state != "PENDING":  # those of `gpulaunch init` requeue themselves
        slurm.run("scontrol", "requeue", job.id)
    slurm.start_again(job)
    slurm.wait_until(lambda: slurm.ended(job), "its second run did not end", job)

    assert code == (way.code or code), first
    began = re.findall(r"BEGAN (\d) AT (\d+)", job.output)
    ranks = len(began) // 2
    assert [step for _, step in began[:ranks]] == ["0"] * ranks, job.output
    assert sorted(began[ranks:]) == [(str(rank), began[ranks][1]) for rank in range(ranks)], job.output
    assert int(began[ranks][1]) >= 3, job.output
    assert (slurm.field(job, "JobState"), slurm.field(job, "ExitCode")) == ("COMPLETED", "0:0"), job.output


def test_after_all_jobs_nothing_is_left_in_memory(slurm, jobs) -> None:
    slurm.wait_until(lambda: not slurm.run("squeue", "-h").strip(), "jobs are still there")

    assert [path.name for path in (slurm.home / "runtime").iterdir()] == []
