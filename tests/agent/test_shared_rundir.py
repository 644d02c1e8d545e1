"""The default run directory of Slurm's tasks: one for all, another for each run in a step, the same after a requeue."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulaunch.launcher.agent.rundir import RunDir, open_run_dir
from gpulaunch.launcher.job import host_info
from gpulaunch.launcher.job.load import load

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_CLUSTER_NAME": "hpc",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def opened(rank: int, **environ: str) -> RunDir:
    environ = {**STEP, "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}", **environ}
    return open_run_dir(load(["train.py"], environ, host_info.detect({})).spec)


def names(directories: list[RunDir]) -> list[str]:
    for each in directories:
        each.close()
    return [str(Path(each.path).relative_to(Path.cwd() / "gpulaunch-runs")) for each in directories]


def test_each_task_has_its_part_of_one_directory_whoever_comes_first() -> None:
    second, first = opened(1), opened(0)

    assert first.shared == second.shared == str(Path.cwd() / "gpulaunch-runs/train-hpc-4711.0")
    assert Path(first.shared).stat().st_mode & 0o777 == 0o700
    assert names([first, second]) == ["train-hpc-4711.0", "train-hpc-4711.0/node-1"]


def test_a_second_run_in_a_step_begins_afresh_and_a_requeued_job_goes_on() -> None:
    """A sweep must not resume from the run before it; each run of a requeued job does from its own."""
    before = [names([opened(0), opened(1)]) for _ in range(3)]
    requeued = [names([opened(0, SLURM_RESTART_COUNT="1"), opened(1, SLURM_RESTART_COUNT="1")]) for _ in range(2)]

    assert before == [[f"train-hpc-4711.0{number}", f"train-hpc-4711.0{number}/node-1"] for number in ("", "-1", "-2")]
    assert requeued == before[:2]


def test_other_steps_jobs_and_clusters_have_others() -> None:
    others = [opened(0, **{name: value}) for name, value in (("SLURM_STEP_ID", "1"), ("SLURM_JOB_ID", "8"))]

    assert names([opened(0), *others, opened(0, SLURM_CLUSTER_NAME="test")]) == [
        "train-hpc-4711.0",
        "train-hpc-4711.1",
        "train-hpc-8.0",
        "train-test-4711.0",
    ]
